"""Which operator computes in which dtype: policies as data."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ampexp.amp.levels import LEVELS
from ampexp.messages import refusal

Entry = type[nn.Module] | Callable[..., object]

REACH: dict[Entry, tuple[str, ...]] = {
    nn.Conv1d: ("conv1d",),
    nn.Conv2d: ("conv2d", "convolution", "_convolution"),
    nn.Conv3d: ("conv3d",),
    nn.ConvTranspose1d: ("conv_transpose1d",),
    nn.ConvTranspose2d: ("conv_transpose2d",),
    nn.ConvTranspose3d: ("conv_transpose3d",),
    nn.Linear: ("linear",),
    nn.LSTMCell: ("lstm_cell",),
    nn.RNNCell: ("rnn_tanh_cell", "rnn_relu_cell"),
    nn.GRUCell: ("gru_cell",),
    torch.matmul: (
        "matmul", "__matmul__", "__rmatmul__", "__imatmul__", "mm", "mv", "addmm", "addmm_", "addmv", "addmv_",
        "dot", "vdot", "inner", "einsum", "tensordot", "bilinear", "chain_matmul", "linalg_matmul",
        "linalg_multi_dot", "scaled_dot_product_attention",
    ),
    torch.bmm: ("bmm", "baddbmm", "baddbmm_", "addbmm", "addbmm_"),
    nn.PReLU: ("prelu", "_prelu_kernel"),
    nn.ReLU: ("relu", "relu_"),
    torch.ger: ("ger", "outer", "addr", "addr_"),
}  # fmt: skip
"""The operators (by the name under which PyTorch dispatches them) that an entry of a list stands for."""

WHITE_LIST: tuple[Entry, ...] = tuple(REACH)
"""What computes in float16 at level O1."""

BLACK_LIST: tuple[Entry, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)
"""What stays float32 at level O2, its subclasses included."""


def get_white_list() -> list[Entry]:
    """Give a copy of the white list: the classes and functions that compute in float16 at level O1.

    Source: `mindspore.amp.get_white_list`; cells and primitives there, modules and functions here.
    """
    return list(WHITE_LIST)


def get_black_list() -> list[Entry]:
    """Give a copy of the black list: the classes that stay float32 at level O2.

    Source: `mindspore.amp.get_black_list`.
    """
    return list(BLACK_LIST)


@dataclass(frozen=True)
class Zone:
    """What operators receive: the dtype of all, and of those named otherwise."""

    compute: torch.dtype
    operators: dict[str, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """What the operators of a network receive, and which modules compute inside in another dtype.

    `low` is the lower of its dtypes; a policy that is None casts nothing at all.
    """

    zone: Zone
    modules: tuple[tuple[type[nn.Module], Zone], ...] = ()
    low: torch.dtype = torch.float16

    def zone_of(self, module: nn.Module) -> Zone | None:
        """Give the zone that a module opens inside the network, or None when it follows the network."""
        for kind, zone in self.modules:
            if isinstance(module, kind):
                return zone
        return None


def whole_network(dtype: torch.dtype, *, keep_batchnorm_fp32: bool) -> Policy:
    """Convert the whole network, BatchNorm and LayerNorm kept in float32 or not."""
    return black_listed(BLACK_LIST if keep_batchnorm_fp32 else (), dtype)


def white_listed(entries: Iterable[Entry], dtype: torch.dtype) -> Policy:
    """Give the listed operators and modules `dtype`, everything else float32."""
    names, kinds = _split(entries)
    zone = Zone(torch.float32, dict.fromkeys(names, dtype))
    return Policy(zone, tuple((kind, Zone(dtype)) for kind in kinds), dtype)


def black_listed(entries: Iterable[Entry], dtype: torch.dtype) -> Policy:
    """Give the listed operators and modules float32, everything else `dtype`."""
    names, kinds = _split(entries)
    zone = Zone(dtype, dict.fromkeys(names, torch.float32))
    return Policy(zone, tuple((kind, Zone(torch.float32)) for kind in kinds), dtype)


def level_policy(
    level: str,
    cast_model_type: torch.dtype | None,
    *,
    keep_batchnorm_fp32: bool,
    low: torch.dtype = torch.float16,
) -> Policy | None:
    """Give the policy of a resolved level.

    Args:
        level: O0, O1, O2 or O3.
        cast_model_type: the dtype the whole network is converted to, whatever the level says; float32: no cast at all;
            None: as the level says.
        keep_batchnorm_fp32: the BatchNorm rule in force.
        low: the dtype that stands where the level says float16.

    """
    if cast_model_type is not None:
        if cast_model_type == torch.float32:
            return None
        return whole_network(cast_model_type, keep_batchnorm_fp32=keep_batchnorm_fp32)
    row = LEVELS[level]
    if row.white_list:
        return white_listed(WHITE_LIST, low)
    if row.compute == "float32":
        return None
    return whole_network(low, keep_batchnorm_fp32=keep_batchnorm_fp32)


def checked_list(where: str, entries: object) -> list[Entry]:
    """Give a list of module classes and functions, or raise TypeError."""
    allowed = "a list of nn.Module classes or functions"
    if not isinstance(entries, list):
        raise TypeError(refusal(where, allowed, entries))
    for entry in entries:
        if not (issubclass(entry, nn.Module) if isinstance(entry, type) else callable(entry)):
            raise TypeError(refusal(where, allowed, entry))
    return entries


def _split(entries: Iterable[Entry]) -> tuple[list[str], list[type[nn.Module]]]:
    """Part a list into the names of operators and the classes whose inside is meant."""
    names: list[str] = []
    kinds: list[type[nn.Module]] = []
    for entry in entries:
        if entry in REACH:
            names += REACH[entry]
        elif isinstance(entry, type):
            kinds.append(entry)
        else:
            name = getattr(entry, "__name__", "")
            names += [
                name,
                *([] if isinstance(entry, types.FunctionType) else [f"{name}_", f"__{name}__"]),
            ]
    return names, kinds
