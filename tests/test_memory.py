from __future__ import annotations

import pytest
import torch
from torch import nn

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


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_is_compiled_while_it_is_measured() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torch.compile(lambda x: network(x) * 2, backend=backend)
    x = torch.ones(2, 3)
    with TensorMemory():
        measured = compiled(x)
    assert len(graphs) == 1
    assert torch.equal(measured, network(x) * 2)
