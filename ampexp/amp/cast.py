"""The act of casting: the only file that changes what an operator receives.

A function mode sees every call of a PyTorch function, method and operator that Python code makes in this thread while
it is active. It casts the floating operands to the dtype that the policy names, with casts that autograd records, and
hands the result on. Nothing of PyTorch or of the network is changed, and no cast is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ampexp.amp import operators
from ampexp.amp.conversion import (
    CastWithSparseGradient,
    convert,
    handed_on_in,
    is_complex,
    is_floating,
    saturated,
    saturated_constant,
    values_cast,
    write_back,
)
from ampexp.amp.operators import Kind
from ampexp.amp.policy import Policy, Zone
from ampexp.amp.unseen import refuse_compiling
from ampexp.kernels.accumulate import Accumulation


class PrecisionError(RuntimeError):
    """An operator of the network cannot compute in the dtype that the level gives it; float32 it can."""


class CastMode(TorchFunctionMode):
    """Give the operators what the policy says, while active; made anew for each call of the network."""

    def __init__(
        self, policy: Policy, root: nn.Module, accumulation: Accumulation | None = None
    ) -> None:
        """Start in the policy's outermost zone; `root` is named in errors, `accumulation` computes where given."""
        super().__init__()
        self.zones: list[Zone] = [policy.zone]
        self.low = policy.low
        self.accumulation = accumulation
        self.root = root
        self.in_backward = False
        self._opening: list[tuple[Callable[..., Any], Any]] = []
        self._switches: list[bool] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one function of PyTorch with its operands cast."""
        refuse_compiling(self)
        kwargs = kwargs or {}
        traits = operators.traits_of(func)
        kind, name = traits.kind, traits.name
        if self.in_backward:
            if func is torch._C._set_grad_enabled:
                self._follow(args[0])
            if not any(self._switches):
                return self._inside_backward(kind, func, args, kwargs)
        zone = self.zones[-1]
        if traits.is_ordinary and not kwargs.get("inplace") and "out" not in kwargs:
            dtype = zone.operators.get(name, zone.compute)
            with no_autocast(args):
                return self._run_ordinary(func, args, kwargs, dtype, zone.compute)
        if kind is Kind.DTYPE:
            return zone.compute if args[0].is_floating_point() else func(*args, **kwargs)
        if kind is Kind.UNTOUCHED:
            return func(*args, **kwargs)
        if kind is Kind.ASSIGN:
            return func(
                args[0], convert(args[1], args[0].dtype) if is_floating(args[0]) else args[1]
            )
        is_listed = name in zone.operators and not traits.has_leaf
        if kind is Kind.COMPOSITE and not is_listed and not self._is_opening(func, args):
            return self._open(func, args, kwargs)
        if name in operators.DECOMPOSED:
            with self:
                return operators.DECOMPOSED[name](*args, **kwargs)
        dtype = zone.operators.get(name, zone.compute)
        if name in operators.SATURATING:
            args, kwargs = saturated(name, args, kwargs, dtype)
        with no_autocast(args):
            return self._run(kind, func, name, args, kwargs, dtype, zone.compute)

    def _follow(self, enabled: bool) -> None:
        """Follow the switches of gradient recording: a backward pass that opens one computes a forward again.

        Inside, parts without gradient belong to that forward, so the switch in force says too little; who calls tells
        an opening from a closing.
        """
        frame = sys._getframe(2)
        if frame.f_code.co_name == "__init__" and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code.co_name == "__enter__":
            self._switches.append(enabled)
        elif frame.f_code.co_name == "__exit__" and self._switches:
            self._switches.pop()

    def _is_opening(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Say whether a function's own body asks again, as methods in Python over one in C do.

        A backward pass inside a backward pass calls the same function too, on other tensors.
        """
        if not self._opening:
            return False
        opening, first = self._opening[-1]
        return opening is func and (args[0] if args else None) is first

    def _open(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._opening.append((func, args[0] if args else None))
        differentiates = operators.name_of(func) in ("grad", "backward")
        try:
            with self, self.backward_scope() if differentiates else nullcontext():
                return operators.opened(func)(*args, **kwargs)
        finally:
            self._opening.pop()

    def _run(
        self,
        kind: Kind,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        handed_on: torch.dtype,
    ) -> Any:
        target = operators.first_tensor(args, kwargs)
        if kind is Kind.VIEW:
            result = func(*args, **kwargs)
            return result if target is None else values_cast(result, target, handed_on)
        if kind is Kind.WRITE:
            return func(*args, **kwargs)
        if kind is Kind.SETITEM:
            return func(
                args[0],
                args[1],
                convert(args[2], args[0].dtype) if args[0].is_floating_point() else args[2],
            )
        if kind is Kind.RANDOM:
            if getattr(kwargs.get("dtype"), "is_floating_point", False) or is_floating(target):
                kwargs = {**kwargs, "dtype": torch.float32} if name != "normal" else kwargs
            drawn = func(*convert(args, torch.float32), **kwargs)
            if name in ("rand", "rand_like") and is_floating(drawn):
                drawn = drawn.clamp(max=operators.largest_drawn(1.0, handed_on))
            return handed_on_in(drawn, handed_on)
        if name in ("dropout", "dropout_") and is_floating(target) and target.device.type != "cpu":
            dropped = operators.dropout(convert(target, dtype), *args[1:], **kwargs)
            return handed_on_in(dropped if name == "dropout" else target.copy_(dropped), handed_on)
        if kind is Kind.RANDOM_INPLACE and is_floating(target):
            drawn = func(torch.empty_like(target, dtype=torch.float32), *args[1:], **kwargs)
            high = kwargs.get("to", args[2] if len(args) > 2 else 1.0)
            if name == "uniform_" and high > 0:
                drawn.clamp_(max=operators.largest_drawn(high, target.dtype))
            with torch.no_grad():
                return target.copy_(drawn)
        if kind is Kind.INPLACE and is_floating(target) and target.dtype is not dtype:
            return self._run_inplace(func, target, args, kwargs, dtype)
        if kwargs.get("out") is not None:
            return self._run_out(func, args, kwargs, dtype)
        if kind is Kind.COMPUTE and (written := operators.written_by(func)):
            return self._run_writing(func, written, args, kwargs, dtype, handed_on)
        if name in operators.SPARSE_GRADIENT and (
            kwargs.get("sparse") or (*args, *[False] * 6)[operators.SPARSE_GRADIENT[name]]
        ):
            args = (CastWithSparseGradient.apply(args[0], dtype), *args[1:])
        if name in operators.MAKES_COMPLEX:
            args, kwargs = convert(args, dtype), convert(kwargs, dtype)
            dtype = torch.float32
        result = self._run_ordinary(func, args, kwargs, dtype, handed_on)
        return saturated_constant(result, handed_on) if name in operators.CONSTANTS else result

    def _run_ordinary(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        handed_on: torch.dtype,
    ) -> Any:
        """Run an operator that asks for nothing but operands of one dtype."""
        operands, kwargs = [convert(arg, dtype) for arg in args], convert(kwargs, dtype)
        if any(map(is_complex, operands)):
            operands, kwargs = convert(operands, torch.float32), convert(kwargs, torch.float32)
        return handed_on_in(self._called(func, operands, kwargs, dtype), handed_on)

    def _run_inplace(
        self,
        func: Callable[..., Any],
        target: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
    ) -> Tensor:
        """Compute on a rounded copy and write it back; what a partial write did not touch keeps its precision."""
        before = target.to(dtype)
        rest = convert(args[1:], dtype)
        kwargs = {
            key: convert(value, dtype) for key, value in kwargs.items() if value is not target
        }
        after = self._called(func, (before.clone(), *rest), kwargs, dtype)
        recorded = torch.is_grad_enabled() and (after.requires_grad or target.requires_grad)
        if recorded or not operators.writes_in_part(operators.name_of(func)):
            return target.copy_(after)
        return write_back(target, before, after)

    def _run_writing(
        self,
        func: Callable[..., Any],
        written: operators.Written,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        handed_on: torch.dtype,
    ) -> Any:
        """Run an operator that writes some of its operands, as normalisations write running statistics."""
        cast_args, cast_kwargs = [convert(arg, dtype) for arg in args], convert(kwargs, dtype)
        copies = []
        for position, name in written:
            by_position = position < len(args)
            original = args[position] if by_position else kwargs.get(name)
            if is_floating(original) and original.dtype is not dtype:
                before = original.to(dtype)
                after = before.clone()
                copies.append((original, before, after))
                if by_position:
                    cast_args[position] = after
                else:
                    cast_kwargs[name] = after
        result = self._called(func, cast_args, cast_kwargs, dtype)
        if copies:
            with torch.no_grad():
                for original, before, after in copies:
                    write_back(original, before, after)
        return handed_on_in(result, handed_on)

    def _run_out(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
    ) -> Any:
        """Compute a fresh result and copy it into the tensors given as `out`."""
        out = kwargs["out"]
        rest = {key: convert(value, dtype) for key, value in kwargs.items() if key != "out"}
        result = self._called(func, convert(args, dtype), rest, dtype)
        single = isinstance(out, Tensor)
        for home, value in zip(
            [out] if single else out, [result] if single else result, strict=True
        ):
            if home.shape != value.shape:
                home.resize_(value.shape)
            home.copy_(value)
        return out

    def _called(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
    ) -> Any:
        if dtype is torch.float32:
            return func(*args, **kwargs)
        if operators.name_of(func) in operators.WRONG_IN_LOW:
            raise self._refusal(func, dtype, "PyTorch's kernel gives wrong numbers")
        try:
            return self._computed(func, args, kwargs)
        except (RuntimeError, TypeError) as error:
            if not _runs(
                func, convert(args, torch.float32), convert(kwargs, torch.float32)
            ):
                raise
            raise self._refusal(func, dtype, str(error).splitlines()[0]) from error

    def _computed(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if self.accumulation is None:
            return func(*args, **kwargs)
        return self.accumulation.call(operators.name_of(func), func, args, kwargs)

    def backward_scope(self) -> AbstractContextManager[Any]:
        """Open the scope in which low-precision gradients are computed, as the processor needs."""
        return nullcontext() if self.accumulation is None else self.accumulation.backward_scope()

    def _refusal(self, func: Callable[..., Any], dtype: torch.dtype, text: str) -> PrecisionError:
        return PrecisionError(
            f"{self.module_path()}: {operators.name_of(func)} cannot compute in {str(dtype).removeprefix('torch.')} "
            f"here ({text}); in float32 it can: train at level O0 or O1, or keep it in float32 with "
            f"custom_mixed_precision(black_list=[...])"
        )

    def _inside_backward(
        self, kind: Kind, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run hooks and users' backward functions: PyTorch's own dtypes, but two dtypes meet in the low one.

        A hook must give back the dtype it got, and the gradient of a weight is float32; a user's backward multiplies a
        low gradient with a float32 weight that its forward saw rounded.
        """
        if kind is Kind.COMPOSITE and not self._is_opening(func, args):
            return self._open(func, args, kwargs)
        if kind is Kind.COMPUTE:
            seen = {value.dtype for value in (*args, *kwargs.values()) if is_floating(value)}
            if self.low in seen and len(seen) > 1:
                args, kwargs = convert(args, self.low), convert(kwargs, self.low)
            if self.low in seen:
                return self._computed(func, args, kwargs)
        return func(*args, **kwargs)

    def is_active(self) -> bool:
        """Say whether this mode is active in the calling thread."""
        return any(mode is self for mode in _get_current_function_mode_stack())

    def module_path(self) -> str:
        """Name the innermost module whose forward is running, by the frames of the call."""
        frame = sys._getframe()
        while frame is not None and not (
            frame.f_code.co_name == "_call_impl"
            and isinstance(frame.f_locals.get("self"), nn.Module)
        ):
            frame = frame.f_back  # type: ignore[assignment]
        module = self.root if frame is None else frame.f_locals["self"]
        path = next((name for name, other in self.root.named_modules() if other is module), "")
        return f"network{'.' if path else ''}{path} ({type(module).__name__})"


def _runs(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        func(*args, **kwargs)
    except Exception:
        return False
    return True


_NOTHING = nullcontext()


def no_autocast(operands: Iterable[Any]) -> AbstractContextManager[Any]:
    """Switch off an autocast that the network or its caller opened: the level alone says what is cast."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    tensor = next((operand for operand in operands if isinstance(operand, Tensor)), None)
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return _NOTHING
    return torch.autocast(tensor.device.type, enabled=False)
