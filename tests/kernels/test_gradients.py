"""Differentiating rules: twice, again, in recomputation, batched, and by whoever transforms functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ampexp.amp import auto_mixed_precision
from ampexp.kernels.accumulate import Accumulation
from ampexp.kernels.formats import FORMATS, LOW_DTYPES
from ampexp.kernels.functions import RULES
from ampexp.kernels.table import SLOW
from tests.kernels.kit import Spy, assert_same_bits, called, filled
from tests.kernels.test_slow import SLOW_CALLS, SUMS

DTYPES = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
LEVELS = pytest.mark.parametrize("level", ["O0", "O2", "O3"])

Operator = tuple[Callable[..., Tensor], list[tuple[int, ...]]]

OPERATORS: dict[str, Operator] = {
    **{
        name: (func, [tuple(min(size, 6) for size in shape) for shape in shapes])
        for name, (func, shapes) in SUMS.items()
    },
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, [(1, 2, 3, 4)] * 3),
    "embedding": (lambda table: torch.embedding(table, torch.tensor([0, 2, 2]), -1, False, False), [(4, 3)]),
    **{
        name: (lambda *t, row=rows[0]: row[0](*t, *row[2], **row[3]), rows[0][1])
        for name, rows in SLOW_CALLS.items()
    },
}  # fmt: skip


def call(name: str, *operands: Tensor) -> Tensor:
    """Call a rule on its operands, the constants of the call filled in."""
    if name == "embedding":
        return called(name, torch.embedding, (*operands, torch.tensor([0, 2, 2]), -1, False, False))
    if name in SLOW_CALLS:
        func, _, args, kwargs = SLOW_CALLS[name][0]
        return called(name, func, (*operands, *args), kwargs)
    return called(name, OPERATORS[name][0], operands)


def test_every_rule_is_differentiated_here() -> None:
    assert set(OPERATORS) == set(RULES)


def operands_of(name: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = OPERATORS[name][1]
    return [(filled(shape, dtype, "ordinary", generator) / 2).abs() + 0.25 for shape in shapes]


def twice(func: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor | None]:
    """Differentiate the squared norm of the gradient of the squared norm of a result."""
    wanted = [x for x in operands if x.requires_grad]
    loss = func(*operands).float().square().mean()
    gradients = torch.autograd.grad(loss, wanted, create_graph=True)
    again = sum(gradient.float().square().mean() for gradient in gradients)
    return list(torch.autograd.grad(again, wanted, allow_unused=True))


ATTENTION = "scaled_dot_product_attention"
TWICE = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, FORMATS[word].dtype)
        for name in OPERATORS
        for word in sorted(SLOW.get(name, FORMATS))
        if name != ATTENTION
    ],
    ids=str,
)


@TWICE
def test_a_gradient_with_a_graph_is_the_gradient(name: str, dtype: torch.dtype) -> None:
    low = [x.requires_grad_() for x in operands_of(name, dtype)]
    result = call(name, *low)
    gradient = filled(result.shape, dtype, "ordinary", torch.Generator().manual_seed(2))
    plain = torch.autograd.grad(result, low, gradient, retain_graph=True)
    for one, other in zip(
        torch.autograd.grad(result, low, gradient, create_graph=True), plain, strict=True
    ):
        assert_same_bits(one.detach(), other)


def test_attention_twice_is_pytorchs_own_error() -> None:
    for func, dtype in ((OPERATORS[ATTENTION][0], torch.float32), (lambda *t: call(ATTENTION, *t), torch.float16)):
        operands = [x.to(dtype).requires_grad_() for x in operands_of(ATTENTION, torch.float16)]
        with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product_flash"):
            twice(func, operands)


@TWICE
def test_derivatives_of_derivatives(name: str, dtype: torch.dtype) -> None:
    """As in float32 on the rounded operands, whichever operands want a gradient; no product is low."""
    low = operands_of(name, dtype)
    choices = [[True] * len(low)]
    if len(low) > 1:
        choices += [[index == only for index in range(len(low))] for only in range(min(len(low), 2))]
    for choice in choices:
        mine = [x.clone().requires_grad_(need) for x, need in zip(low, choice, strict=True)]
        wide = [x.float().requires_grad_(need) for x, need in zip(low, choice, strict=True)]
        with Spy() as spy:
            found = twice(lambda *t: call(name, *t), mine)
        assert spy.low_products() == []
        expected = twice(OPERATORS[name][0], wide)
        tolerance = torch.finfo(dtype).eps * 8
        for one, other in zip(found, expected, strict=True):
            one, other = (torch.zeros(()) if x is None else x.float() for x in (one, other))
            assert one.isfinite().all()
            assert (one - other).abs().max() <= tolerance * other.abs().max() + 1e-5


@DTYPES
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("name", OPERATORS)
def test_recomputed_is_the_same(name: str, reentrant: bool, dtype: torch.dtype) -> None:
    low = operands_of(name, dtype)
    results = []
    for again in (False, True):
        leaves = [x.clone().requires_grad_() for x in low]
        part = (lambda *t: checkpoint(call, name, *t, use_reentrant=reentrant)) if again else (
            lambda *t: call(name, *t)
        )  # fmt: skip
        part(*leaves).float().square().sum().backward()
        results.append([x.grad for x in leaves])
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_that_is_kept_gives_the_same_again_and_another_does_not(name: str) -> None:
    low = [x.requires_grad_() for x in operands_of(name, torch.float16)]
    loss = call(name, *low).float().square().sum()
    first = torch.autograd.grad(loss, low, retain_graph=True)
    second = torch.autograd.grad(loss, low)
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, low)


@pytest.mark.parametrize("name", OPERATORS)
def test_without_gradients_the_numbers_are_the_same(name: str) -> None:
    low = operands_of(name, torch.float16)
    recorded = call(name, *(x.clone().requires_grad_() for x in low)).detach()
    for scope in (torch.no_grad, torch.inference_mode):
        with scope():
            result = call(name, *low)
        assert not result.requires_grad
        assert_same_bits(result.clone(), recorded)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operand_that_was_written_since_is_pytorchs_error(name: str) -> None:
    low = [x.requires_grad_() for x in operands_of(name, torch.float16)]
    copies = [x.clone() for x in low]
    result = call(name, *copies)
    with torch.no_grad():
        for x in copies:
            x.add_(1)
    if name in ("mean", "embedding", "cumsum", "im2col", "adaptive_avg_pool2d"):
        return  # what it is of, no gradient depends on
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.float().square().sum().backward()


@pytest.mark.parametrize("name", ["linear", "matmul", "bmm", "conv2d", "embedding", "square"])
def test_batched_gradients_are_those_of_a_loop(name: str) -> None:
    low = [x.requires_grad_() for x in operands_of(name, torch.float16)]
    result = call(name, *low)
    generator = torch.Generator().manual_seed(2)
    gradients = filled((3, *result.shape), torch.float16, "ordinary", generator)
    batched = torch.autograd.grad(
        result, low, gradients, is_grads_batched=True, retain_graph=True
    )
    each = [torch.autograd.grad(result, low, gradient, retain_graph=True) for gradient in gradients]
    for one, rows in zip(batched, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(rows), rtol=2e-3, atol=2e-3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 3)
    )  # fmt: skip


def forward_mode(cast: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = cast(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(dual).tangent


def doubled(cast: nn.Module, x: Tensor) -> Tensor:
    weights = {name: parameter.detach() * 2 for name, parameter in cast.named_parameters()}
    return torch.func.functional_call(cast, weights, (x,))


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda cast, x: torch.func.grad(lambda y: cast(y).square().sum())(x),
    "vmap": lambda cast, x: torch.vmap(cast)(x[:, None]),
    "vmap_of_grad": lambda cast, x: torch.vmap(torch.func.grad(lambda y: cast(y[None]).sum()))(x),
    "vjp": lambda cast, x: torch.func.vjp(cast, x)[1](torch.ones(5, 3))[0],
    "jvp": lambda cast, x: torch.func.jvp(cast, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda cast, x: torch.func.jacrev(cast)(x),
    "jacfwd": lambda cast, x: torch.func.jacfwd(cast)(x),
    "hessian": lambda cast, x: torch.func.hessian(lambda y: cast(y).square().sum())(x[:1]),
    "forward_mode": forward_mode,
    "functional_call": doubled,
    "jacobian": lambda cast, x: torch.autograd.functional.jacobian(cast, x, vectorize=True),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own forward mode
@LEVELS
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_work_as_without_levels(transform: str, level: str) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    plain = TRANSFORMS[transform](network(), x)
    mine = TRANSFORMS[transform](auto_mixed_precision(network(), level), x)
    tolerance = 0.0 if level == "O0" else 1e-2
    torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_hooks_see_low_gradients(level: str) -> None:
    seen = []

    class Hooked(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x)
                x.register_hook(seen.append)
            return x

    auto_mixed_precision(Hooked(*network()), level)(torch.randn(5, 4)).sum().backward()
    assert {gradient.dtype for gradient in seen} == {torch.float16}
    assert len(seen) == len(network())


def test_a_network_without_composites_needs_no_mode_in_backward() -> None:
    accumulation = Accumulation()
    for name in OPERATORS:
        func, *rest = SLOW_CALLS[name][0] if name in SLOW_CALLS else (OPERATORS[name][0], [], (), {})
        low = [x.requires_grad_() for x in operands_of(name, torch.float16)]
        if name != "embedding":
            accumulation.call(name, func, (*low, *rest[1]), rest[2])
    assert not accumulation.backward_needs_mode
