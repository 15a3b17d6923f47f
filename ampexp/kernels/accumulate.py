"""Low-precision work on a processor without instructions for it: summed in float32 and rounded once.

That is what a tensor core does. A CPU without instructions for float16 or bfloat16 computes them one number at a time,
and PyTorch's own convolution there rounds each image's share of a weight's gradient: slower and less accurate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampexp.kernels.formats import LOW_DTYPES, format_name
from ampexp.kernels.functions import RULES, Application, run
from ampexp.kernels.table import ACCUMULATED, FLOAT32_OPERANDS, FLOAT32_RESULTS, PLAIN, SLOW


class Accumulation:
    """How the operators of one network reach float32 arithmetic, and whether its backward pass needs the mode."""

    def __init__(self) -> None:
        """Start with a network that has run nothing."""
        self.backward_needs_mode = False

    def call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operator on low-precision operands: by its rule, by PyTorch where that is as fast, or in the mode."""
        if name in PLAIN:
            return func(*args, **kwargs)
        if (application := _application(name, args, kwargs)) is not None:
            return run(application)
        if name in SLOW:
            return func(*args, **kwargs)
        self.backward_needs_mode = True
        with AccumulateMode():
            return func(*args, **kwargs)

    def backward_scope(self) -> AbstractContextManager[Any]:
        """Open the scope of a backward pass through what has been called."""
        return AccumulateMode() if self.backward_needs_mode else nullcontext()


def _application(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Application | None:
    """Give the rule for a call; None where its operands are not what rules are for."""
    if name not in RULES:
        return None
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return None
    try:
        application = RULES[name](*args, **kwargs)
    except (TypeError, AttributeError):  # not this operator's arguments: PyTorch says what is wrong
        return None
    if application is None:
        return None
    dtype = None
    for operand in application.operands:
        if operand is None:
            continue
        dtype = dtype or operand.dtype
        if type(operand) not in _DENSE or operand.dtype is not dtype or not operand.is_cpu:
            return None
        if operand.layout is not torch.strided:
            return None
    if dtype not in LOW_DTYPES or (name in SLOW and format_name(dtype) not in SLOW[name]):
        return None
    return application


_DENSE = (Tensor, torch.nn.Parameter)


class AccumulateMode(TorchDispatchMode):
    """Compute the listed operators in float32 when their operands are low-precision CPU tensors.

    It sees what no rule sees: the parts of composite operators (recurrent layers, einsum) and derivatives of them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # below autograd nothing is cast by level any more
            listed = _listed(func)
            if listed is not None:
                low = _shared_low(listed.name, [*args, *kwargs.values()])
                if low is not None:
                    return _accumulated(listed, low, args, kwargs)
            elif torch.is_inference_mode_enabled() and isinstance(func, torch._ops.OpOverload):
                with self:  # there composite operators arrive whole
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)


class _Listed(NamedTuple):
    """A listed operator in its functional form, and where its result is to be written."""

    name: str
    functional: Any
    in_place: bool


@cache
def _listed(func: Any) -> _Listed | None:
    space, _, name = func._schema.name.partition("::")
    functional_name = name.rstrip("_")
    if space != "aten" or functional_name not in ACCUMULATED or "dtype" in func._overloadname:
        return None
    if not func._schema.is_mutable:
        return _Listed(functional_name, func, False)
    if len(func._schema.returns) > 1:
        return None
    functional = getattr(torch.ops.aten, functional_name).default
    return _Listed(functional_name, functional, name != functional_name)


def _accumulated(listed: _Listed, low: torch.dtype, args: tuple[Any, ...], kwargs: Any) -> Any:
    out = kwargs.pop("out", None)
    result = listed.functional(*map(_wide, args), **{key: _wide(x) for key, x in kwargs.items()})
    if isinstance(result, Tensor):
        home = args[0] if listed.in_place else out
        if home is None:
            return result.to(low)
        return home.resize_(result.shape).copy_(result.to(low))
    exact = FLOAT32_RESULTS.get(listed.name, ())
    return tuple(
        _narrow(value, low) if index not in exact else value for index, value in enumerate(result)
    )


def _shared_low(name: str, operands: list[Any]) -> torch.dtype | None:
    """Give the low dtype of all floating operands; None for another, and for several, which PyTorch refuses."""
    exact = FLOAT32_OPERANDS.get(name, ())
    tensors = [x for i, x in enumerate(operands) if isinstance(x, Tensor) and i not in exact]
    dtypes = {x.dtype for x in tensors if x.is_floating_point()}
    if len(dtypes) != 1 or not all(x.device.type == "cpu" for x in tensors):
        return None
    (dtype,) = dtypes
    return dtype if dtype in LOW_DTYPES else None


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_DTYPES else value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
