"""Matrix and convolution work on low-precision operands, summed in float32 and rounded once.

That is what a tensor core does. A CPU without instructions for float16 or bfloat16 computes them one number at a time,
and PyTorch's own convolution there rounds each image's share of a weight's gradient: slower and less accurate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LOW_DTYPES = (torch.float16, torch.bfloat16)

_aten = torch.ops.aten
ACCUMULATED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.addbmm.default,
        _aten.addr.default,
        _aten._trilinear.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
"""The operators that are computed in float32 on low-precision operands and rounded once."""

_NATIVE_FLAGS = {
    torch.float16: ("avx512_fp16", "amx_fp16"),
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
}


@cache
def has_native(dtype: torch.dtype) -> bool:
    """Say whether this CPU has instructions that multiply in `dtype`."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag, False) for flag in _NATIVE_FLAGS[dtype])


def arithmetic(device_type: str, dtype: torch.dtype) -> str:
    """Name the way that low-precision work goes on this processor, and why: for the record."""
    if dtype not in LOW_DTYPES:
        return "native"
    if device_type != "cpu":
        return "native"
    word = str(dtype).removeprefix("torch.")
    if has_native(dtype):
        return f"native ({word} instructions)"
    return f"float32_accumulate (this CPU has no {word} instructions; not the accelerator's speed)"


class AccumulateMode(TorchDispatchMode):
    """Compute the listed operators in float32 when their operands are low-precision CPU tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        with torch._C.DisableTorchFunction():  # below autograd nothing is cast by level any more
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in ACCUMULATED:
            return func(*args, **kwargs)
        low = next((arg.dtype for arg in args if isinstance(arg, Tensor) and _is_low(arg)), None)
        if low is None:
            return func(*args, **kwargs)
        result = func(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})
        return (
            _narrow(result, low) if isinstance(result, Tensor) else _narrow_all(func, result, low)
        )


def accumulate_scope(device_type: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Make the mode active where the processor needs it; elsewhere do nothing."""
    if device_type == "cpu" and dtype in LOW_DTYPES and not has_native(dtype):
        return AccumulateMode()
    return nullcontext()


def _is_low(value: Tensor) -> bool:
    return value.dtype in LOW_DTYPES and value.device.type == "cpu"


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and _is_low(value) else value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _narrow_all(func: Any, results: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Round all results but attention's log-sum-exp, which PyTorch keeps in float32 itself."""
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return (_narrow(results[0], dtype), *results[1:])
    return tuple(_narrow(result, dtype) for result in results)
