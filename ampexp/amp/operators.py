"""What kind of thing a PyTorch function is, as far as casting its operands goes."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Kind(enum.Enum):
    """How the operands of a function are treated."""

    COMPUTE = enum.auto()  # operands cast, a fresh result handed on
    COMPOSITE = enum.auto()  # written in Python over others: opened, so that its parts are seen
    VIEW = enum.auto()  # its result shares memory with its operand: writes to it must land there
    INPLACE = enum.auto()  # reads and writes its first operand
    WRITE = enum.auto()  # overwrites its first operand, converting by itself
    SETITEM = enum.auto()
    RANDOM = enum.auto()  # draws: in float32 at every level, so that all levels draw alike
    RANDOM_INPLACE = enum.auto()
    DTYPE = enum.auto()  # asks for the dtype
    UNTOUCHED = enum.auto()  # no arithmetic


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNTOUCHED = _words(
    "size dim ndimension numel nelement stride storage_offset is_contiguous is_complex is_floating_point "
    "element_size data_ptr untyped_storage storage get_device is_pinned is_inference is_shared is_set_to is_same_size "
    "is_conj is_neg __len__ __hash__ __deepcopy__ __reduce_ex__ __repr__ __dir__ requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook detach_ resize_ resize_as_ set_ share_memory_ rename_ names_ "
    "__setstate__ _is_view record_stream is_signed __torch_function__"
)
_RANDOM = _words("rand randn rand_like randn_like normal")
_RANDOM_INPLACE = _words("normal_ uniform_ exponential_ cauchy_ log_normal_")
_WRITE = _words("copy_ zero_")
_CONVERSIONS = _words("to type clone _to_copy")  # schemas call them views, their results are values

SATURATING = _words(
    "masked_fill masked_fill_ fill_ index_fill index_fill_ where clamp clamp_ clamp_min clamp_min_ clamp_max "
    "clamp_max_ constant_pad_nd pad _pad threshold threshold_ hardtanh hardtanh_ __setitem__ full full_like new_full"
)
"""Operators that take a constant to put in place: one that the dtype cannot hold becomes its largest finite number
(PyTorch raises), so that a mask of -1e9 means the same at every level."""

HIDDEN_WRITES = {"batch_norm": (3, 4), "instance_norm": (3, 4)}
"""Operators that write operands without saying so in their schema, and the positions of these operands."""

MAKES_COMPLEX = _words(
    "complex polar view_as_complex stft istft fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft "
    "fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft fft_hfft2 fft_ihfft2 fft_hfftn fft_ihfftn"
)
"""Operators between real and complex numbers. Complex numbers are never low: real operands are rounded like all others
and then widened, so that the complex side is complex64."""

SPARSE_GRADIENT = {"embedding": 4, "embedding_bag": 5}
"""Operators with an argument `sparse` (at this position): with it, the gradient of their first operand is sparse."""


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Drop with a mask drawn in float32: fused kernels draw otherwise for each dtype."""
    if not train or p in (0.0, 1.0):
        return torch.dropout(x, p, train)
    keep = torch.dropout(torch.ones_like(x, dtype=torch.float32), p, True).ne(0)
    return x * keep * (1.0 / (1.0 - p))


DECOMPOSED: dict[str, Callable[..., Any]] = {"_weight_norm": _weight_norm}
"""Fused operators whose CPU kernel mixes dtypes, and the same in PyTorch's elementary operators."""

CONSTANTS = _words("tensor as_tensor scalar_tensor new_tensor")
"""Factories whose result is a constant of the program: saturated like those above."""


@cache
def name_of(func: Callable[..., Any]) -> str:
    """Give the name under which PyTorch dispatches a function: `mm` for `torch.ops.aten.mm.default` too."""
    return str(getattr(func, "__name__", "")).split(".")[0]


@cache
def kind_of(func: Callable[..., Any]) -> Kind:
    """Say how the operands of a function are treated."""
    name = name_of(func)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return Kind.DTYPE if (name, attribute) == ("__get__", "dtype") else Kind.UNTOUCHED
    table = (
        (_RANDOM, Kind.RANDOM),
        (_RANDOM_INPLACE, Kind.RANDOM_INPLACE),
        (_UNTOUCHED, Kind.UNTOUCHED),
        (_WRITE, Kind.WRITE),
        ({"__setitem__"}, Kind.SETITEM),
        ({"__getitem__"}, Kind.VIEW),
    )
    for names, kind in table:
        if name in names:
            return kind
    if name.startswith("_foreach_"):
        return Kind.UNTOUCHED
    if isinstance(func, types.FunctionType):
        return Kind.COMPOSITE
    if (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name != "__invert__"
    ):
        return Kind.INPLACE
    if name not in _CONVERSIONS and _shares_memory(name):
        return Kind.VIEW
    return Kind.COMPUTE


def _shares_memory(name: str) -> bool:
    """Read from the schema whether a result may share memory with an operand."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in schema.returns
        ):
            return True
    return False


def _never(*_: object) -> bool:
    return False


@cache
def opened(func: types.FunctionType) -> types.FunctionType:
    """Copy a Python function of PyTorch so that it goes on to its body instead of asking for overrides again.

    PyTorch's composites first hand themselves to whoever overrides functions; the copy is the same code with that
    question answered no, and what its body calls is seen one by one. PyTorch itself is not changed.
    """
    answers = {name: _never for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **answers},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def has_leaf(name: str) -> bool:
    """Say whether PyTorch has an operator of its own under this name (beside a Python function)."""
    homes = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
    return any(hasattr(home, name) for home in homes)


def writes_in_part(name: str) -> bool:
    """Say whether an in-place operator leaves some numbers of its first operand as they are."""
    return name.startswith(("index_", "masked_", "scatter_")) or name in ("put_", "fill_diagonal_")


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Give the operand that an in-place function writes to."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return first if isinstance(first, Tensor) else None
