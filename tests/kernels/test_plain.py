"""What is left to PyTorch's own low-precision kernels: no matrix work hides in it, and it is PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ampexp.kernels.accumulate import Accumulation
from ampexp.kernels.formats import LOW_DTYPES
from ampexp.kernels.functions import RULES
from ampexp.kernels.table import ACCUMULATED, PLAIN
from tests.kernels.kit import Spy, filled
from tests.kernels.plain_calls import CALLS

HOMES = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, Tensor, torch.nn.functional)


def function(name: str) -> Any:
    homes = (Tensor,) if name.startswith("__") else HOMES
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def maker(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: filled(shape, dtype, "ordinary", generator).requires_grad_()


def test_every_plain_name_has_a_call() -> None:
    assert set(CALLS) == PLAIN


def test_the_ways_exclude_each_other() -> None:
    assert not PLAIN & set(RULES)
    assert not PLAIN & ACCUMULATED


@pytest.mark.parametrize("name", sorted(PLAIN))
@pytest.mark.filterwarnings("ignore:Conversion of an array:UserWarning")
def test_no_matrix_work_hides(name: str) -> None:
    """Nor in its gradient; and the backward pass needs no mode for it."""
    for dtype in LOW_DTYPES:
        func, accumulation = function(name), Accumulation()
        call = partial(accumulation.call, name, func)
        with Spy() as spy:
            results = tree_leaves(CALLS[name](lambda *args, call=call: call(args, {}), maker(dtype)))
            for result in results:
                if isinstance(result, Tensor) and result.grad_fn is not None:
                    result.float().square().sum().backward()
        assert spy.names() & ACCUMULATED == set()
        assert not accumulation.backward_needs_mode


@pytest.mark.parametrize("name", sorted(PLAIN - {"empty", "empty_like", "new_empty"}))
def test_it_is_pytorchs_own(name: str) -> None:
    """The call goes on as it is: the same operators below autograd, the same bits."""
    func, found = function(name), []
    for call in (func, lambda *args: Accumulation().call(name, func, args, {})):
        torch.manual_seed(0)
        with Spy() as spy:
            results = tree_leaves(CALLS[name](call, maker(torch.float16)))
        found.append((spy.calls, [x for x in results if isinstance(x, Tensor)]))
    (own_calls, own), (calls, mine) = found
    assert calls == own_calls
    for one, other in zip(mine, own, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
