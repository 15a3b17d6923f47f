"""Low-precision formats, and what this processor has for them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import cache

import torch

from ampexp.messages import refusal


@dataclass(frozen=True)
class Format:
    """A number format that PyTorch stores as a dtype of its own, and the flags of a CPU that multiplies in it."""

    dtype: torch.dtype
    flags: tuple[str, ...]


FORMATS: dict[str, Format] = {
    "float16": Format(torch.float16, ("avx512_fp16", "amx_fp16")),
    "bfloat16": Format(torch.bfloat16, ("avx512_bf16", "amx_bf16")),
}
"""The formats that low-precision work can be computed in, by name."""

LOW_DTYPES = tuple(row.dtype for row in FORMATS.values())

FLOAT32_ACCUMULATE = "float32_accumulate"
"""How a record calls low-precision work that is summed in float32 and rounded once: not the accelerator's speed."""

SLOWEST_NATIVE = 1.5
"""A CPU whose flags promise a format must not need more than this many times the float32 time to be believed."""

_SIDE, _TRIES = 192, 5


def format_name(dtype: torch.dtype | str) -> str:
    """Give the name of a format, or raise ValueError for one that is not in the table."""
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(refusal("low-precision format", FORMATS, name))
    return name


@cache
def has_flag(name: str) -> bool:
    """Say whether this CPU declares instructions that multiply in a format."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag, False) for flag in FORMATS[name].flags)


@cache
def times_slower(name: str) -> float:
    """Measure, once a process, a matrix product in a format against float32: the ratio of the fastest tries."""
    operand = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    low = operand.to(FORMATS[name].dtype)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return _fastest(low) / _fastest(operand)


def _fastest(operand: torch.Tensor) -> float:
    seconds = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        torch.mm(operand, operand)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(sorted(seconds)[:3])


def why_not_native(device_type: str, dtype: torch.dtype) -> str | None:
    """Say why PyTorch's own kernels of a format are not used on this processor; None where they are.

    Accelerators compute low precision themselves. A CPU does when its flags say so and a measurement agrees.
    Raises ValueError for a format that is not in the table.
    """
    name = format_name(dtype)
    if device_type != "cpu":
        return None
    if not has_flag(name):
        return f"this CPU has no {name} instructions"
    slower = times_slower(name)
    if slower > SLOWEST_NATIVE:
        return f"this CPU declares {name} instructions, but multiplies {slower:.1f} times slower than in float32"
    return None


def arithmetic(device_type: str, dtype: torch.dtype) -> str:
    """Name the way that low-precision work goes on this processor, and why: for the record."""
    if (reason := why_not_native(device_type, dtype)) is not None:
        return f"{FLOAT32_ACCUMULATE} ({reason})"
    return "native" if device_type != "cpu" else f"native ({format_name(dtype)} instructions)"
