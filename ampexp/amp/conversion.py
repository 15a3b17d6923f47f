"""Tensors, and containers of them, from one dtype to another."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_floating(value: object) -> TypeGuard[Tensor]:
    """Say whether a value is a tensor of real floating numbers (sparse ones included)."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_complex(value: object) -> bool:
    """Say whether a value is a complex number or a tensor of them."""
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def convert(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in an argument (a tensor, or lists, tuples and dicts of them); leave all else."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        converted = [convert(item, dtype) for item in value]
        if all(new is old for new, old in zip(converted, value, strict=True)):
            return value
        return rebuilt(value, converted)
    if type(value) is dict:
        return {key: convert(item, dtype) for key, item in value.items()}
    return value


def rebuilt(like: Any, items: list[Any]) -> Any:
    """Make a list, tuple, named tuple or PyTorch's named result of the same concrete type from other items."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


class CastWithSparseGradient(torch.autograd.Function):
    """A cast whose gradient may be sparse: PyTorch's own refuses to convert one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Round."""
        ctx.dtype = value.dtype
        return value.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Widen, keeping the layout."""
        return grads[0].to(ctx.dtype), None


def write_back(target: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Write what changed into the original: what was not written keeps its precision."""
    return target.copy_(torch.where(after == before, target, after.to(target.dtype)))


def handed_on_in(result: Any, dtype: torch.dtype) -> Any:
    """Convert the floating results of an operator to what the next ones receive."""
    if isinstance(result, Tensor):
        if result.dtype is dtype or not result.is_floating_point():
            return result
        if (
            result.requires_grad and result.is_leaf
        ):  # a factory with requires_grad=True gives a leaf
            return result.detach().to(dtype).requires_grad_()
        return result.to(dtype)
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        items = [handed_on_in(item, dtype) for item in result]
        return (
            result
            if all(new is old for new, old in zip(items, result, strict=True))
            else _same_kind(result, items)
        )
    return result


def _same_kind(result: Any, items: list[Any]) -> Any:
    if type(result).__module__ == "torch.return_types":
        return type(result)(items)
    return rebuilt(result, items)


def values_cast(result: Any, source: Tensor, dtype: torch.dtype) -> Any:
    """Leave views of the source as they are, so that writes land there; convert what is a value of its own."""
    if isinstance(result, list | tuple):
        items = [values_cast(item, source, dtype) for item in result]
        return (
            result
            if all(new is old for new, old in zip(items, result, strict=True))
            else _same_kind(result, items)
        )
    if not is_floating(result) or result.dtype is dtype or result is source:
        return result
    return result if _share_memory(result, source) else result.to(dtype)


def _share_memory(result: Tensor, source: Tensor) -> bool:
    if result.layout is not torch.strided or source.layout is not torch.strided:
        return False
    return result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def saturated(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bound the finite numbers among the arguments by what the dtype holds.

    The largest number stands for what is larger. A bound of a clamp that would be 0 is there to divide by: for it
    stands the smallest normal number, whose reciprocal is finite.
    """
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    floating = any(map(is_floating, tensors))
    if tensors and not floating:
        return args, kwargs
    floating = floating or getattr(kwargs.get("dtype"), "is_floating_point", False)
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps if "clamp" in name else 0.0

    def bound(value: Any) -> Any:
        if not isinstance(value, float if not floating else Real) or isinstance(value, bool):
            return value
        number = float(value)
        if info.max < abs(number) < float("inf"):
            return math.copysign(info.max, number)
        return math.copysign(info.smallest_normal, number) if 0 < abs(number) < least else value

    return tuple(map(bound, args)), {key: bound(value) for key, value in kwargs.items()}


def saturated_constant(result: Any, dtype: torch.dtype) -> Any:
    """Bound the finite numbers of a constant tensor by the largest finite number of the dtype."""
    if not is_floating(result) or torch.finfo(dtype).max >= torch.finfo(result.dtype).max:
        return result
    limit = torch.finfo(dtype).max
    return torch.where(result.isinf(), result, result.clamp(-limit, limit))
