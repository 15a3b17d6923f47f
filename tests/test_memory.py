from __future__ import annotations

import torch

from ampexp.memory import TensorMemory


def test_the_peak_is_a_hand_count() -> None:
    unit = 4 * 1000
    x = torch.ones(1000)
    weight = torch.ones(1000, requires_grad=True)
    memory = TensorMemory()
    memory.hold([x, x.view(10, 100), weight])  # a view is the same storage
    assert memory.live_bytes == 2 * unit
    with memory:
        y = (x * weight).exp()  # the product is freed, the exponential kept for backward
        assert memory.live_bytes == 3 * unit
        assert memory.peak_bytes == 4 * unit
        loss = y.sum()
        del y
        assert memory.live_bytes == 3 * unit + 4
        loss.backward()
        assert memory.live_bytes <= 4 * unit + 8  # the saved tensor is gone, the gradient is there
        del loss
    assert memory.live_bytes == 3 * unit


def test_half_precision_takes_half() -> None:
    memory = TensorMemory()
    with memory:
        kept = torch.ones(1000, dtype=torch.float16)
    assert memory.peak_bytes == 2 * 1000
    assert kept.dtype == torch.float16


def test_what_was_measured_computes_the_same() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(5, 3), torch.randn(4, 5)
    plain = layer(x)
    with TensorMemory():
        measured = layer(x)
    assert torch.equal(plain, measured)
