"""Operators with a rule: bitwise the float32 operator on the rounded operands, rounded once, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ampexp.kernels.formats import LOW_DTYPES
from tests.kernels.kit import LAYOUTS, VALUES, assert_exact, filled, laid

DTYPES = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
FEW = settings(max_examples=10)


class Draw:
    """Operands and choices of one example."""

    def __init__(self, data: st.DataObject, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype
        self.values = data.draw(st.sampled_from(VALUES), "values")
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))

    def __call__(self, *choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))

    def size(self, least: int = 1, most: int = 5) -> int:
        return self.data.draw(st.integers(least, most))

    def operand(self, *shape: int, layouts: tuple[str, ...] = LAYOUTS) -> Tensor:
        tensor = laid(filled(shape, self.dtype, self.values, self.generator), self(*layouts))
        return tensor.detach().requires_grad_(self(True, True, False))

    def check(self, name: str, func: Any, *args: Any, **kwargs: Any) -> None:
        reads = name == "scaled_dot_product_attention"
        assert_exact(name, func, args, kwargs, gradient_layout=self(*LAYOUTS), reads_its_output=reads)


examples = st.data()


@DTYPES
@FEW
@given(data=examples)
def test_linear(dtype: torch.dtype, data: st.DataObject) -> None:
    draw = Draw(data, dtype)
    inside, outside = draw(1, 2, 40), draw.size()
    rows = [draw.size(0, 4) for _ in range(draw.size(1, 3))]
    bias = draw.operand(outside) if draw(True, False) else None
    draw.check("linear", F.linear, draw.operand(*rows, inside), draw.operand(outside, inside), bias)


PRODUCTS = {
    "matmul": torch.matmul, "__matmul__": Tensor.__matmul__, "mm": torch.mm, "bmm": torch.bmm,
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("name", PRODUCTS)
@FEW
@given(data=examples)
def test_products(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    draw = Draw(data, dtype)
    axes = {"mm": 0, "bmm": 1}.get(name, draw(0, 1, 2))
    batch = [draw.size(0, 3) for _ in range(axes)]
    inside = draw(1, 2, 40)
    other = batch if name in ("mm", "bmm") or draw(True, False) else []
    a, b = (*batch, draw.size(), inside), (*other, inside, draw.size())
    draw.check(name, PRODUCTS[name], draw.operand(*a), draw.operand(*b))


@DTYPES
@pytest.mark.parametrize("axes", [1, 2, 3])
@FEW
@given(data=examples)
def test_convolution(axes: int, dtype: torch.dtype, data: st.DataObject) -> None:
    draw = Draw(data, dtype)
    groups, kernel = draw(1, 1, 2), [draw.size(1, 3) for _ in range(axes)]
    image = [draw.size(5, 6) for _ in range(axes)]
    into, out = groups * draw.size(1, 3), groups * draw.size(1, 3)
    bias = draw.operand(out) if draw(True, False) else None
    draw.check(
        f"conv{axes}d", getattr(F, f"conv{axes}d"),
        draw.operand(draw.size(0, 3), into, *image), draw.operand(out, into // groups, *kernel), bias,
        stride=draw(1, 2, [2] * axes), padding=draw(0, 1), dilation=draw(1, 2), groups=groups,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("axes", [1, 2, 3])
@FEW
@given(data=examples)
def test_transposed_convolution(axes: int, dtype: torch.dtype, data: st.DataObject) -> None:
    draw = Draw(data, dtype)
    groups, stride = draw(1, 1, 2), draw(1, 2)
    image, kernel = [draw.size(2, 4) for _ in range(axes)], [draw.size(2, 3) for _ in range(axes)]
    into, out = groups * draw.size(1, 3), draw.size(1, 3)
    bias = draw.operand(out * groups) if draw(True, False) else None
    draw.check(
        f"conv_transpose{axes}d", getattr(F, f"conv_transpose{axes}d"),
        draw.operand(draw.size(0, 3), into, *image), draw.operand(into, out, *kernel), bias,
        stride=stride, padding=draw(0, 1), output_padding=draw(0, stride - 1), groups=groups,
        dilation=draw(1, 2) if stride == 1 else 1,
    )  # fmt: skip


@DTYPES
@FEW
@given(data=examples)
def test_attention(dtype: torch.dtype, data: st.DataObject) -> None:
    draw = Draw(data, dtype)
    batch, heads, width = draw.size(1, 3), draw.size(1, 3), draw(1, 4, 8)
    rows, columns = draw.size(1, 7), draw.size(1, 7)
    layouts = ("dense", "expanded", "offset")
    draw.check(
        "scaled_dot_product_attention", F.scaled_dot_product_attention,
        draw.operand(batch, heads, rows, width, layouts=layouts),
        *(draw.operand(batch, heads, columns, width, layouts=layouts) for _ in range(2)),
        is_causal=draw(True, False), scale=draw(None, 0.25),
    )  # fmt: skip


@DTYPES
@FEW
@given(data=examples)
def test_embedding(dtype: torch.dtype, data: st.DataObject) -> None:
    draw = Draw(data, dtype)
    rows = draw.size(2, 6)
    indices = torch.randint(0, rows, (draw.size(0, 40), draw.size()), generator=draw.generator)
    table = draw.operand(rows, draw.size())
    draw.check("embedding", torch.embedding, table, indices, draw(-1, 0, 1), draw(True, False), False)
