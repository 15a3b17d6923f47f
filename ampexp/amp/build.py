"""From a network, an optimizer and a loss to a network that trains one step a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampexp.amp.levels import LEVELS, resolve_level
from ampexp.amp.loss_scale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScale,
    LossScaleManager,
    NoLossScale,
)
from ampexp.amp.network import (
    PrecisionNetwork,
    checked_level,
    checked_network,
    device_of,
    refuse_twice,
    under_policy,
)
from ampexp.amp.policy import level_policy
from ampexp.amp.step import TrainNetwork
from ampexp.boost import make_boosts
from ampexp.boost.base import Boost
from ampexp.boost.levels import BOOST_LEVELS, NOTES
from ampexp.kernels.formats import arithmetic
from ampexp.messages import nearest, refusal

_UNSET = object()
_KEYWORDS = (
    "cast_model_type",
    "keep_batchnorm_fp32",
    "loss_scale_manager",
    "cpu_loss_scaling",
    "scheduler",
)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def build_train_network(
    network: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any] | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> TrainNetwork:
    """Build a network that trains one step a call, at a precision level and a boost level.

    Args:
        network: the network; it is not changed, parameters stay float32.
        optimizer: of its parameters; no closure optimizer.
        loss_fn: of (output, label), computed in float32; None: the network returns the loss.
        level: O0, O1, O2, O3 or auto (the one recommended for the processor).
        boost_level: O0, O1 or O2.
        **kwargs: `cast_model_type` (torch.float16, bfloat16 or float32: the dtype of the whole network; float32: no
            cast at all), `keep_batchnorm_fp32` (bool), `loss_scale_manager` (a LossScaleManager; None: no scaling);
            not given, each is as the level says. Extensions to MindSpore: bfloat16; `cpu_loss_scaling=True` lets a
            level that skips overflowing steps run on the CPU; `scheduler`, stepped after each applied update.

    Raises:
        TypeError: an argument of wrong kind.
        ValueError: an unknown level or keyword; loss scaling on the CPU without `cpu_loss_scaling=True`; a network that
            computes in mixed precision already, built at another level than O0; a network whose operators cannot be
            seen; a closure optimizer or one without parameters that train.

    Source: `mindspore.amp.build_train_network`. There a boost level takes effect only through `Model`; here always.

    >>> network = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    >>> train_network = build_train_network(network, optimizer, nn.MSELoss(), level="O3")
    >>> train_network(torch.ones(2, 4), torch.ones(2, 1)).loss.dtype
    torch.float32

    """
    checked_network(network)
    checked_level(level)
    if boost_level not in BOOST_LEVELS if isinstance(boost_level, str) else True:
        raise ValueError(refusal("boost_level", BOOST_LEVELS, boost_level))
    for key in kwargs:
        if key not in _KEYWORDS:
            raise ValueError(
                f"build_train_network has no argument {key!r}; it has {', '.join(_KEYWORDS)}{nearest(key, _KEYWORDS)}"
            )
    return assemble(
        network,
        optimizer,
        loss_fn,
        level,
        make_boosts(boost_level),
        boost_level=boost_level,
        **kwargs,
    )


def assemble(
    network: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any] | None,
    level: str,
    boosts: Sequence[Boost],
    *,
    boost_level: str = "O0",
    cast_model_type: Any = _UNSET,
    keep_batchnorm_fp32: Any = _UNSET,
    loss_scale_manager: Any = _UNSET,
    cpu_loss_scaling: bool = False,
    scheduler: Any = None,
    clip_norm: float | None = None,
) -> TrainNetwork:
    """Build from checked words and made boosts; `clip_norm` bounds the norm of the unscaled gradients."""
    device = device_of(network)
    resolved = resolve_level(level, device.type)
    row = LEVELS[resolved]
    cast = None if cast_model_type is _UNSET else _checked_dtype(cast_model_type)
    keep = row.keep_batchnorm_fp32
    if keep_batchnorm_fp32 is not _UNSET:
        keep = _checked_bool("keep_batchnorm_fp32", keep_batchnorm_fp32)
    cpu_loss_scaling = _checked_bool("cpu_loss_scaling", cpu_loss_scaling)
    scale = _loss_scale(loss_scale_manager, row.loss_scale_manager)
    if device.type == "cpu" and scale.skips and not cpu_loss_scaling:
        origin = (
            f"level {resolved} implies"
            if loss_scale_manager is _UNSET
            else "loss_scale_manager gives"
        )
        raise ValueError(
            f"on device CPU loss_scale_manager must be None or FixedLossScaleManager(drop_overflow_update=False); "
            f"{origin} {scale}; give one of these, another level, or cpu_loss_scaling=True to run it in full on the CPU"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(refusal("loss_fn", "a function of (output, label) or None", loss_fn))
    _check_optimizer(optimizer)
    _check_scheduler(scheduler)
    policy = level_policy(resolved, cast, keep_batchnorm_fp32=keep)
    if level != "O0" or policy is not None:
        refuse_twice(network, "build_train_network")
    for boost in boosts:
        boost.rewrite(network)
    record = {
        "level": resolved,
        "requested_level": level,
        "cast_model_type": _cast_words(resolved, cast),
        "keep_batchnorm_fp32": _norm_words(policy, keep),
        "loss_scale_manager": str(scale),
        "arithmetic": "native" if policy is None else arithmetic(device.type, policy.low),
        "boost_level": boost_level,
        "boosts": ", ".join(
            f"{name} ({boost.effect})"
            for name, boost in zip(BOOST_LEVELS[boost_level], boosts, strict=True)
        )
        or "none",
    }
    if boost_level in NOTES:
        record["boost_note"] = NOTES[boost_level]
    cast_network = (
        PrecisionNetwork(network, None) if policy is None else under_policy(network, policy)
    )
    return TrainNetwork(
        cast_network, optimizer, loss_fn, scale, boosts, record, scheduler, clip_norm
    )


def _cast_words(level: str, cast: torch.dtype | None) -> str:
    if cast is None:
        return "float16 white list" if LEVELS[level].white_list else LEVELS[level].compute
    return str(cast).removeprefix("torch.")


def _norm_words(policy: Any, keep: bool) -> str:
    if policy is None or policy.zone.compute is torch.float32 or keep:
        return "float32"
    return str(policy.zone.compute).removeprefix("torch.")


def _checked_dtype(value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(refusal("cast_model_type", [f"torch.{name}" for name in _DTYPES], value))
    if value not in _DTYPES.values():
        raise ValueError(
            refusal("cast_model_type", [f"torch.{name}" for name in _DTYPES], str(value))
        )
    return value


def _checked_bool(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(refusal(where, "True or False", value))
    return value


def _loss_scale(given: object, implied: str) -> LossScale:
    if given is _UNSET:
        managers = {"fixed": FixedLossScaleManager, "dynamic": DynamicLossScaleManager}
        return managers[implied]().loss_scale() if implied in managers else NoLossScale()
    if given is None:
        return NoLossScale()
    if not isinstance(given, LossScaleManager):
        raise TypeError(
            refusal("loss_scale_manager", "a LossScaleManager (an instance) or None", given)
        )
    return given.loss_scale()


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(refusal("optimizer", "one torch.optim.Optimizer", optimizer))
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer must step without a closure; got {type(optimizer).__name__}, which needs one"
        )
    if not any(
        parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise ValueError(
            "optimizer must hold at least one parameter that requires a gradient; it has none"
        )


def _check_scheduler(scheduler: object) -> None:
    if scheduler is None:
        return
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise TypeError(
            refusal(
                "scheduler", "a learning-rate scheduler with a step() method, or None", scheduler
            )
        )
    required = [
        name
        for name, parameter in inspect.signature(step).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if required:
        raise ValueError(
            f"scheduler.step() must need no argument; {type(scheduler).__name__}.step needs {', '.join(required)}"
        )
