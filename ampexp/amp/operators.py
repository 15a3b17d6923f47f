"""What kind of thing a PyTorch function is, as far as casting its operands goes."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ampexp.kernels.table import words


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
    ASSIGN = enum.auto()  # gives a tensor other storage (`x.data = y`), in the dtype that x has
    UNTOUCHED = enum.auto()  # no arithmetic


_UNTOUCHED = words(
    "size dim ndimension numel nelement stride storage_offset is_contiguous is_complex is_floating_point "
    "element_size data_ptr untyped_storage storage get_device is_pinned is_inference is_shared is_set_to is_same_size "
    "is_conj is_neg __len__ __hash__ __deepcopy__ __reduce_ex__ __repr__ __dir__ requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook detach_ resize_ resize_as_ set_ share_memory_ rename_ names_ "
    "__setstate__ _is_view record_stream is_signed __torch_function__"
)
_RANDOM = words("rand randn rand_like randn_like normal")
_RANDOM_INPLACE = words("normal_ uniform_ exponential_ cauchy_ log_normal_")
_WRITE = words("copy_ zero_")
_CONVERSIONS = words("to type clone _to_copy")  # schemas call them views, their results are values

SATURATING = words(
    "masked_fill masked_fill_ fill_ index_fill index_fill_ where clamp clamp_ clamp_min clamp_min_ clamp_max "
    "clamp_max_ constant_pad_nd pad _pad threshold threshold_ hardtanh hardtanh_ __setitem__ full full_like new_full"
)
"""Operators that take a constant to put in place: one that the dtype cannot hold becomes its largest finite number
(PyTorch raises), so that a mask of -1e9 means the same at every level."""

Written = tuple[tuple[int, str], ...]

_STATISTICS = ((3, "running_mean"), (4, "running_var"))
_HIDDEN_WRITES: dict[str, Written] = {
    "batch_norm": _STATISTICS,
    "instance_norm": _STATISTICS,
    "native_batch_norm": _STATISTICS,
    "batch_norm_update_stats": ((1, "running_mean"), (2, "running_var")),
}
"""Operators that write operands without saying so in their schema: positions and names of these operands."""

WRONG_IN_LOW = words("matrix_exp linalg_matrix_exp")
"""Operators that take low-precision operands without an error and give garbage (torch 2.13, CPU): refused."""

MAKES_COMPLEX = words(
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


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    norms = [torch.linalg.vector_norm(x, 2, dim, keepdim=True).clamp_min(eps) for x in (x1, x2)]
    return (x1 / norms[0] * (x2 / norms[1])).sum(dim)


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_weight_norm": _weight_norm,  # its CPU kernel mixes dtypes
    "cosine_similarity": _cosine_similarity,  # its eps would be 0 in float16
}
"""Fused operators that go wrong in low precision, and the same in PyTorch's elementary operators."""

CONSTANTS = words("tensor as_tensor scalar_tensor new_tensor")
"""Factories whose result is a constant of the program: saturated like those above."""


_SINGLE = frozenset(
    (F.relu, F.silu, F.mish, F.softmax, F.log_softmax, F.layer_norm, F.max_pool1d, F.max_pool2d, F.max_pool3d)
)
"""Composites that do nothing but call one operator of the same name: not opened, unless they are to write in place."""

_SPECIAL = SATURATING | WRONG_IN_LOW | MAKES_COMPLEX | CONSTANTS | {"dropout", "dropout_"}


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
        special = {("__get__", "dtype"): Kind.DTYPE, ("__set__", "data"): Kind.ASSIGN}
        return special.get((name, attribute), Kind.UNTOUCHED)
    if name in _UNTOUCHED or getattr(func, "__module__", "") == "torch.nn.init":
        return Kind.UNTOUCHED  # initial values are drawn in the dtype they are stored in
    if isinstance(func, types.FunctionType):
        return Kind.COMPOSITE
    table = (
        (_RANDOM, Kind.RANDOM),
        (_RANDOM_INPLACE, Kind.RANDOM_INPLACE),
        (_WRITE, Kind.WRITE),
        ({"__setitem__"}, Kind.SETITEM),
        ({"__getitem__"}, Kind.VIEW),
    )
    for names, kind in table:
        if name in names:
            return kind
    if name.startswith("_foreach_"):
        return Kind.UNTOUCHED
    if (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name != "__invert__"
    ):
        return Kind.INPLACE
    if name not in _CONVERSIONS | MAKES_COMPLEX and _shares_memory(func):
        return Kind.VIEW
    return Kind.COMPUTE


def _schemas(func: Callable[..., Any]) -> list[Any]:
    """Give the schemas of an operator: its own, or those of PyTorch's operator of its name."""
    if isinstance(func, torch._ops.OpOverload):
        return [func._schema]
    packet = func
    if not isinstance(func, torch._ops.OpOverloadPacket):
        packet = getattr(torch.ops.aten, name_of(func), None)  # type: ignore[assignment]
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


def _shares_memory(func: Callable[..., Any]) -> bool:
    """Read from the schema whether a result may share memory with an operand."""
    results = [result for schema in _schemas(func) for result in schema.returns]
    return any(result.alias_info and not result.alias_info.is_write for result in results)


@cache
def written_by(func: Callable[..., Any]) -> Written:
    """Give the operands (position, name) that an operator writes, `out` apart."""
    declared = {
        (position, argument.name)
        for schema in _schemas(func)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write and not argument.kwarg_only
    }
    return _HIDDEN_WRITES.get(name_of(func), ()) + tuple(sorted(declared))


@dataclass(frozen=True, slots=True)
class Traits:
    """What never changes about a function: asked for at each call, found once."""

    kind: Kind
    name: str
    has_leaf: bool  # PyTorch has an operator of its own under this name, beside a Python function
    is_ordinary: bool  # nothing but casting its operands is to be done, unless it is to write


@cache
def traits_of(func: Callable[..., Any]) -> Traits:
    """Find what never changes about a function."""
    kind, name = kind_of(func), name_of(func)
    homes = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
    special = (
        name in _SPECIAL
        or name in SPARSE_GRADIENT
        or name in DECOMPOSED
        or (kind is Kind.COMPUTE and bool(written_by(func)))
    )
    has_leaf = any(hasattr(home, name) for home in homes)
    is_ordinary = func in _SINGLE or (kind is Kind.COMPUTE and not special)
    return Traits(kind, name, has_leaf, is_ordinary)


def largest_drawn(high: float, dtype: torch.dtype) -> float:
    """Give the largest number of `dtype` below `high` > 0: a draw below it must not be rounded up to it."""
    return high * (1.0 - torch.finfo(dtype).eps / 2)


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


def writes_in_part(name: str) -> bool:
    """Say whether an in-place operator leaves some numbers of its first operand as they are."""
    return name.startswith(("index_", "masked_", "scatter_")) or name in ("put_", "fill_diagonal_")


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Give the operand that an in-place function writes to."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return first if isinstance(first, Tensor) else None
