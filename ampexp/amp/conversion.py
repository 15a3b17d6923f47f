"""Tensors, and containers of them, from one dtype to another."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_floating(value: object) -> TypeGuard[Tensor]:
    """Say whether a value is a tensor of real floating numbers (sparse ones included)."""
    return isinstance(value, Tensor) and value.is_floating_point()


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
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bound the finite Python numbers among the arguments by the largest finite number of the dtype."""
    limit = torch.finfo(dtype).max
    integers_only = any(isinstance(arg, Tensor) for arg in args) and not any(map(is_floating, args))

    def bound(value: Any) -> Any:
        if type(value) is float and limit < abs(value) < float("inf") and not integers_only:
            return limit if value > 0 else -limit
        return value

    return tuple(map(bound, args)), {key: bound(value) for key, value in kwargs.items()}


def saturated_constant(result: Any, dtype: torch.dtype) -> Any:
    """Bound the finite numbers of a constant tensor by the largest finite number of the dtype."""
    if not is_floating(result) or torch.finfo(dtype).max >= torch.finfo(result.dtype).max:
        return result
    limit = torch.finfo(dtype).max
    return torch.where(result.isinf(), result, result.clamp(-limit, limit))
