"""The mode: every listed operator of PyTorch's inside is computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampexp.kernels.accumulate import AccumulateMode
from ampexp.kernels.formats import LOW_DTYPES
from ampexp.kernels.table import ACCUMULATED, FLOAT32_RESULTS
from tests.kernels.kit import Spy, assert_same_bits, filled, low_tensors, wide_copy

aten = torch.ops.aten
DTYPES = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)

CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
FLASH = aten._scaled_dot_product_flash_attention_for_cpu
INDICES, OFFSETS = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 2])
Make = Callable[[Callable[..., Tensor]], tuple[Any, ...]]

LISTED: dict[str, list[Make]] = {
    "mm": [lambda t: (t(5, 40), t(40, 3)), lambda t: (t(40, 5).t(), t(40, 3)), lambda t: (t(0, 4), t(4, 3))],
    "addmm": [lambda t: (t(3), t(5, 40), t(40, 3)), lambda t: (t(5, 3), t(5, 0), t(0, 3))],
    "bmm": [lambda t: (t(2, 5, 40), t(2, 40, 3)), lambda t: (t(1, 5, 4).expand(3, 5, 4), t(3, 4, 2))],
    "baddbmm": [lambda t: (t(2, 5, 3), t(2, 5, 40), t(2, 40, 3))],
    "addbmm": [lambda t: (t(5, 3), t(2, 5, 40), t(2, 40, 3))],
    "mv": [lambda t: (t(5, 40), t(40)), lambda t: (t(40, 5).t(), t(40))],
    "addmv": [lambda t: (t(5), t(5, 40), t(40))],
    "dot": [lambda t: (t(300), t(300)), lambda t: (t(80)[::2], t(40))],
    "vdot": [lambda t: (t(300), t(300))],
    "addr": [lambda t: (t(3, 4), t(3), t(4))],
    "_trilinear": [lambda t: (t(2, 3, 40), t(2, 3, 40), t(2, 3, 40), [], [], [], [2])],
    "_addmm_activation": [lambda t: (t(3), t(5, 40), t(40, 3))],
    "convolution": [
        lambda t: (t(2, 4, 7, 7), t(6, 4, 3, 3), t(6), *CONVOLUTION),
        lambda t: (t(2, 4, 7, 7), t(4, 6, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ],
    "convolution_backward": [
        lambda t: (t(2, 6, 7, 7), t(2, 4, 7, 7), t(6, 4, 3, 3), [6], *CONVOLUTION, [True] * 3),
    ],
    "_cdist_forward": [lambda t: (t(5, 40), t(3, 40), 2.0, None)],
    "_cdist_backward": [lambda t: (t(5, 3), t(5, 40), t(3, 40), 2.0, t(5, 3).abs())],
    "_scaled_dot_product_flash_attention_for_cpu": [lambda t: (t(2, 2, 6, 8), t(2, 2, 6, 8), t(2, 2, 6, 8))],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [
        lambda t: (*(t(2, 2, 6, 8) for _ in range(5)), torch.ones(2, 2, 6), 0.0, False),
    ],
    "embedding_dense_backward": [lambda t: (t(40, 3), torch.arange(40) % 2, 4, -1, False)],
    "_embedding_bag_backward": [
        lambda t: (t(2, 3), INDICES, OFFSETS, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]),
                   torch.tensor([1, 1]), 3, False, 0, False, None),
    ],
}  # fmt: skip
"""Calls of the listed operators."""


def maker(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: filled(shape, dtype, "ordinary", generator)


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_every_listed_operator_stands_under_the_law() -> None:
    assert set(LISTED) == ACCUMULATED


@DTYPES
@pytest.mark.parametrize("name", LISTED)
def test_float32_arithmetic_rounded_once(name: str, dtype: torch.dtype) -> None:
    func = getattr(aten, name).default
    for make in LISTED[name]:
        args = make(maker(dtype))
        with Spy() as spy, AccumulateMode():
            results = as_tuple(func(*args))
        assert spy.low_products() == []
        kept = FLOAT32_RESULTS.get(name, ())
        for index, (mine, exact) in enumerate(
            zip(results, as_tuple(func(*wide_copy(args))), strict=True)
        ):
            if isinstance(exact, Tensor) and exact.is_floating_point():
                assert_same_bits(mine, exact if index in kept else exact.to(dtype))


SCALED: dict[str, list[tuple[int, ...]]] = {
    "addmm": [(5, 3), (5, 40), (40, 3)],
    "baddbmm": [(2, 5, 3), (2, 5, 40), (2, 40, 3)],
    "addbmm": [(5, 3), (2, 5, 40), (2, 40, 3)],
    "addmv": [(5,), (5, 40), (40,)],
    "addr": [(3, 4), (3,), (4,)],
}
PLAIN_PRODUCTS: dict[str, list[tuple[int, ...]]] = {
    "mm": [(5, 40), (40, 3)],
    "bmm": [(2, 5, 40), (2, 40, 3)],
    "mv": [(5, 40), (40,)],
    "dot": [(40,), (40,)],
}


@DTYPES
@pytest.mark.parametrize("name", SCALED)
def test_in_place_writes_there_and_nowhere_else(name: str, dtype: torch.dtype) -> None:
    args = [maker(dtype)(*shape) for shape in SCALED[name]]
    expected = getattr(torch, name)(*(x.float() for x in args), beta=0.5, alpha=2).to(dtype)
    home = torch.stack([args[0], args[0]], -1)
    view = home[..., 0]
    with Spy() as spy, AccumulateMode():
        result = getattr(view, f"{name}_")(*args[1:], beta=0.5, alpha=2)
    assert spy.low_products() == []
    assert result is view
    assert_same_bits(home[..., 0], expected)
    assert_same_bits(home[..., 1], args[0])


@DTYPES
@pytest.mark.parametrize("name", [*SCALED, *PLAIN_PRODUCTS])
def test_out_is_written_and_resized_as_pytorch_does(name: str, dtype: torch.dtype) -> None:
    args = [maker(dtype)(*shape) for shape in (SCALED | PLAIN_PRODUCTS)[name]]
    func = getattr(torch, name)
    expected = func(*(x.float() for x in args)).to(dtype)
    for out in (torch.empty_like(expected), torch.empty(0, dtype=dtype)):
        with Spy() as spy, AccumulateMode():
            assert func(*args, out=out) is out
        assert spy.low_products() == []
        assert_same_bits(out, expected)


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "linear": F.linear,
    "addmm": lambda a, b: torch.addmm(b, a, a),
    "addmm_": lambda a, b: b.clone().addmm_(a, a),
}


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_operands_of_two_dtypes_are_pytorchs_error(name: str, other: torch.dtype) -> None:
    """What PyTorch refuses is not computed silently in either."""
    a, b = torch.ones(4, 4).half(), torch.ones(4, 4, dtype=other)
    with pytest.raises(RuntimeError):
        MIXED[name](a, b)
    with AccumulateMode(), pytest.raises(RuntimeError):
        MIXED[name](a, b)


def test_what_is_not_low_and_what_is_not_listed_is_left_alone() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with Spy() as spy, AccumulateMode():
        assert torch.equal(torch.mm(a, b), a @ b)
        assert torch.mm(a.double(), b.double()).dtype is torch.float64
        half = a.half()
        spy.calls.clear()
        assert (half + half).dtype is torch.float16
    assert spy.calls == [("add", frozenset({torch.float16}))]


@DTYPES
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_convolutions_weight_gradient_is_rounded_once(axes: int, dtype: torch.dtype) -> None:
    """PyTorch's own rounds each image's share of it."""
    make = maker(dtype)
    x, w = make(32, 2, *[6] * axes), make(2, 2, *[3] * axes).requires_grad_()
    convolution = getattr(F, f"conv{axes}d")
    with AccumulateMode():
        (mine,) = torch.autograd.grad(convolution(x, w).sum(), w)
    (own,) = torch.autograd.grad(convolution(x, w).sum(), w)
    wide = wide_copy(w)
    (exact,) = torch.autograd.grad(convolution(x.float(), wide).sum(), wide)
    assert_same_bits(mine, exact.to(dtype))
    assert low_tensors(own)
    assert not torch.equal(mine, own)
