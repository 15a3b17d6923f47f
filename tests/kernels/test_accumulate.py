"""Low-precision work on a CPU: bitwise float32 arithmetic on the same operands, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.amp import auto_mixed_precision
from ampexp.kernels import formats
from ampexp.kernels.accumulate import AccumulateMode
from ampexp.kernels.formats import arithmetic

Operator = tuple[Callable[..., Tensor], list[tuple[int, ...]]]

OPERATORS: dict[str, Operator] = {
    "mm": (torch.mm, [(5, 40), (40, 3)]),
    "addmm": (torch.addmm, [(3,), (5, 40), (40, 3)]),
    "linear": (F.linear, [(2, 5, 40), (3, 40), (3,)]),
    "bmm": (torch.bmm, [(2, 5, 40), (2, 40, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 3), (2, 5, 40), (2, 40, 3)]),
    "mv": (torch.mv, [(5, 40), (40,)]),
    "dot": (torch.dot, [(40,), (40,)]),
    "matmul": (torch.matmul, [(2, 5, 40), (40, 3)]),
    "conv1d": (F.conv1d, [(2, 4, 9), (6, 4, 3), (6,)]),
    "conv2d": (F.conv2d, [(2, 4, 7, 7), (6, 4, 3, 3), (6,)]),
    "conv3d": (F.conv3d, [(2, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)]),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 4, 7, 7), (6, 4, 3, 3)]),
    "grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=2), [(2, 4, 7, 7), (6, 2, 3, 3), (6,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 4, 5), (4, 3, 3), (3,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 4, 5, 5), (4, 3, 3, 3), (3,)]),
    "conv_transpose3d": (F.conv_transpose3d, [(1, 2, 3, 3, 3), (2, 2, 2, 2, 2), (2,)]),
    "sdpa": (F.scaled_dot_product_attention, [(2, 2, 6, 8)] * 3),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 2, 6, 8)] * 3,
    ),
}  # fmt: skip


def operands(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_float32_arithmetic_rounded_once(name: str, dtype: torch.dtype) -> None:
    operator, shapes = OPERATORS[name]
    low = operands(shapes, dtype)
    wide = [operand.detach().float().requires_grad_() for operand in low]
    with AccumulateMode():
        result = operator(*low)
    expected = operator(*wide)
    assert result.dtype is dtype
    assert torch.equal(result, expected.to(dtype))

    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    with AccumulateMode():
        gradients = torch.autograd.grad(result, low, gradient)
    if name in ("sdpa", "causal"):  # its backward reads the rounded output
        expected.data.copy_(expected.detach().to(dtype))
    for mine, exact in zip(
        gradients, torch.autograd.grad(expected, wide, gradient.float()), strict=True
    ):
        assert mine.dtype is dtype
        assert torch.equal(mine, exact.to(dtype))


def test_a_convolutions_gradient_is_not_pytorchs_own() -> None:
    """PyTorch rounds each image's share of a weight's gradient; the mode rounds the sum, once."""
    gradients = []
    for scope in (AccumulateMode(), nullcontext()):
        low = operands([(32, 2, 12, 12), (2, 2, 3, 3)], torch.float16)
        with scope:
            F.conv2d(*low).sum().backward()
        gradients.append(low[1].grad)
    assert not torch.equal(*gradients)


def test_float32_and_mixed_operands_are_left_alone() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with AccumulateMode():
        assert torch.equal(torch.mm(a, b), a @ b)
        assert (a.half() + a.half()).dtype is torch.float16


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_layer_of_a_network_is_rounded_once(level: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 5), torch.randn(7, 64)
    with torch.no_grad():
        output = auto_mixed_precision(layer, level)(x)
        exact = F.linear(*(t.half().float() for t in (x, layer.weight, layer.bias)))
    assert torch.equal(output, exact.half().float())


def test_the_record_says_which_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_flag", lambda name: False)
    assert arithmetic("cpu", torch.float16).startswith(
        "float32_accumulate (this CPU has no float16"
    )
    monkeypatch.setattr(formats, "has_flag", lambda name: True)
    monkeypatch.setattr(formats, "times_slower", lambda name: 1.0)
    assert arithmetic("cpu", torch.float16) == "native (float16 instructions)"
    monkeypatch.setattr(formats, "times_slower", lambda name: 20.0)
    assert "multiplies 20.0 times slower" in arithmetic("cpu", torch.float16)
    assert arithmetic("cuda", torch.float16) == "native"
