"""The precision levels as a table of words; nothing here knows torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LowDtype = Literal["float16", "bfloat16"]

CAST_MODEL_TYPES = ("float16", "bfloat16", "float32")
"""The words of `cast_model_type`: what the whole network is converted to, whatever the level says."""

LOSS_SCALE_MANAGERS = ("none", "fixed", "dynamic")
"""The words of `loss_scale_manager`."""


@dataclass(frozen=True)
class Level:
    """What one precision level means.

    `compute` is the dtype the network's operators receive; `white_list` says that the operators of the white list
    receive float16 all the same; `keep_batchnorm_fp32` that BatchNorm and LayerNorm compute in float32;
    `loss_scale_manager` how the loss is scaled.
    """

    compute: str
    white_list: bool
    keep_batchnorm_fp32: bool
    loss_scale_manager: str
    meaning: str


LEVELS: dict[str, Level] = {
    "O0": Level("float32", False, False, "none", "float32, nothing changes"),
    "O1": Level(
        "float32",
        True,
        True,
        "none",
        "the operators of the white list in float16, all others in float32",
    ),
    "O2": Level(
        "float16",
        False,
        True,
        "dynamic",
        "the network in float16, BatchNorm and LayerNorm in float32, dynamic loss scale",
    ),
    "O3": Level("float16", False, False, "none", "the whole network in float16"),
}

AUTO = "auto"
LEVEL_NAMES = (*LEVELS, AUTO)

RECOMMENDED = {"cuda": "O2", "npu": "O3"}
"""The level that `auto` stands for, by type of processor; every other processor gets O0."""


def resolve_level(level: str, device_type: str) -> str:
    """Give the level's own name, `auto` replaced by the level recommended for the processor.

    >>> resolve_level("auto", "cuda"), resolve_level("auto", "cpu"), resolve_level("O1", "cuda")
    ('O2', 'O0', 'O1')
    """
    return RECOMMENDED.get(device_type, "O0") if level == AUTO else level
