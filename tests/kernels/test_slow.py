"""Operators whose own low-precision kernels are slow are computed in float32; and every rule is accurate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ampexp.kernels.formats import FORMATS, LOW_DTYPES
from ampexp.kernels.functions import RULES
from ampexp.kernels.table import SLOW
from tests.kernels.kit import LAYOUTS, VALUES, assert_exact, called, filled, laid

DTYPES = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
FEW = settings(max_examples=8)
functions, nn_functions = torch._C._VariableFunctions, torch._C._nn

Call = tuple[Callable[..., Tensor], list[tuple[int, ...]], tuple[Any, ...], dict[str, Any]]
"""A function, the shapes of its low operands (they come first), its other arguments."""

SLOW_CALLS: dict[str, list[Call]] = {
    "pow": [
        (torch.pow, [(2, 3, 4)], (2,), {}),
        (torch.pow, [(2, 3, 4)], (0.5,), {}),
        (Tensor.pow, [(2, 3, 4)], (0,), {}),
        (Tensor.pow, [(2, 3, 4)], (), {"exponent": -1}),
    ],
    "square": [(torch.square, [(2, 3, 4)], (), {})],
    "group_norm": [
        (functions.group_norm, [(2, 4, 3)], (2,), {}),
        (functions.group_norm, [(2, 4, 3)], (4,), {"eps": 0.1}),
    ],
    "im2col": [(nn_functions.im2col, [(2, 3, 4, 5)], ((2, 2), (1, 1), (0, 0), (1, 1)), {})],
    "huber_loss": [
        (nn_functions.huber_loss, [(2, 3, 4), (2, 3, 4)], (1, 0.5), {}),
        (nn_functions.huber_loss, [(2, 3, 4), (2, 3, 4)], (0, 1.0), {}),
    ],
    "grid_sampler": [(torch.grid_sampler, [(2, 3, 4, 5), (2, 2, 3, 2)], (0, 0, False), {})],
}  # fmt: skip
PAIRS = [(name, FORMATS[word].dtype) for name, words in SLOW.items() for word in sorted(words)]


def test_every_slow_name_stands_under_the_law() -> None:
    assert set(SLOW_CALLS) == set(SLOW)
    assert set(SLOW) <= set(RULES)


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
@FEW
@given(data=st.data())
def test_in_float32_rounded_once(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    func, shapes, args, kwargs = data.draw(st.sampled_from(SLOW_CALLS[name]))
    values = data.draw(st.sampled_from(VALUES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    operands = []
    for shape in shapes:
        layout = "contiguous" if name == "group_norm" else data.draw(st.sampled_from(LAYOUTS))
        operand = laid(filled(shape, dtype, values, generator), layout)
        operands.append(operand.detach().requires_grad_(data.draw(st.booleans())))
    layout = data.draw(st.sampled_from(LAYOUTS))
    assert_exact(name, func, (*operands, *args), kwargs, gradient_layout=layout)


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_an_empty_batch(name: str, dtype: torch.dtype) -> None:
    func, shapes, args, kwargs = SLOW_CALLS[name][0]
    operands = [torch.ones(0, *shape[1:]).to(dtype).requires_grad_() for shape in shapes]
    assert_exact(name, func, (*operands, *args), kwargs)


def test_group_normalisation_with_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (filled(s, torch.float16, "ordinary", generator).requires_grad_() for s in [(2, 4, 3), (4,), (4,)])
    assert_exact("group_norm", functions.group_norm, (x, 2, w, b, 1e-5), {})


ASKED: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "mean": (torch.mean, (0,)),
    "cumsum": (torch.cumsum, (0,)),
    "norm": (functions.norm, (2, [0], False)),
    "linalg_vector_norm": (torch.linalg.vector_norm, (2,)),
}


@pytest.mark.parametrize("asked", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ASKED)
def test_a_dtype_that_is_asked_for_is_given(name: str, asked: torch.dtype) -> None:
    func, args = ASKED[name]
    x = torch.randn(5, 4).half()
    result = called(name, func, (x, *args), {"dtype": asked})
    assert result.dtype is asked
    assert torch.equal(result, func(x, *args, dtype=asked))


# accuracy: against the same sum in float64

SUMS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 300), (3, 300), (3,)]),
    "matmul": (torch.matmul, [(2, 5, 300), (300, 3)]),
    "__matmul__": (Tensor.__matmul__, [(2, 5, 300), (2, 300, 3)]),
    "mm": (torch.mm, [(5, 300), (300, 3)]),
    "bmm": (torch.bmm, [(2, 5, 300), (2, 300, 3)]),
    "conv1d": (F.conv1d, [(16, 2, 20), (3, 2, 3), (3,)]),
    "conv2d": (F.conv2d, [(16, 2, 8, 8), (3, 2, 3, 3), (3,)]),
    "conv3d": (F.conv3d, [(8, 2, 5, 5, 5), (3, 2, 2, 2, 2), (3,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(16, 3, 20), (3, 2, 3), (2,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(16, 3, 8, 8), (3, 2, 3, 3), (2,)]),
    "conv_transpose3d": (F.conv_transpose3d, [(8, 3, 4, 4, 4), (3, 2, 2, 2, 2), (2,)]),
}
NO_SUMS = {"scaled_dot_product_attention", "embedding", *SLOW}


def half_a_unit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Give half the distance between neighbours of a format at these values."""
    info = torch.finfo(dtype)
    magnitude = values.abs().clamp_min(info.smallest_normal)
    return torch.exp2(magnitude.log2().floor()) * info.eps / 2


def test_every_sum_stands_under_the_law_of_accuracy() -> None:
    assert set(SUMS) | NO_SUMS == set(RULES)


@DTYPES
@pytest.mark.parametrize("name", SUMS)
def test_accurate_to_half_a_unit_in_the_last_place(name: str, dtype: torch.dtype) -> None:
    """|y - exact| <= ulp(y) / 2 + K 2^-24 sum |a b|, for results and gradients of K products."""
    func, shapes = SUMS[name]
    generator = torch.Generator().manual_seed(5)
    low = [filled(shape, dtype, "ordinary", generator).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in low]
    sizes = [x.detach().double().abs().requires_grad_() for x in low]
    result, wanted, size = called(name, func, tuple(low)), func(*exact), func(*sizes)
    gradient = filled(wanted.shape, dtype, "ordinary", generator)
    mine = [result, *torch.autograd.grad(result, low, gradient)]
    true = [wanted, *torch.autograd.grad(wanted, exact, gradient.double())]
    sums = [size, *torch.autograd.grad(size, sizes, gradient.double().abs())]
    for one, other, bound in zip(mine, true, sums, strict=True):
        products = max(x.numel() for x in (*low, gradient))
        allowed = half_a_unit(one.double(), dtype) + products * 2.0**-24 * bound
        assert ((one.double() - other).abs() <= allowed).all()
