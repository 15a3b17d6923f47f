"""Networks under a precision policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ampexp.amp.batch import converted_inputs, to_float32
from ampexp.amp.cast import CastMode
from ampexp.amp.levels import LEVEL_NAMES, LEVELS, resolve_level
from ampexp.amp.policy import (
    Policy,
    black_listed,
    checked_list,
    level_policy,
    white_listed,
)
from ampexp.amp.scope import cast_scope
from ampexp.amp.unseen import refuse_compiling, refuse_unseen
from ampexp.kernels.accumulate import Accumulation
from ampexp.kernels.formats import LOW_DTYPES, why_not_native
from ampexp.messages import refusal


class PrecisionNetwork(nn.Module):
    """A network whose operators compute as a policy says; weights, flags and state-dict names stay the network's own.

    Called, it gives what the network gives, floating outputs in float32. With `policy` None it is the network itself.
    """

    def __init__(self, network: nn.Module, policy: Policy | None) -> None:
        """Hold the network; nothing of it is changed."""
        super().__init__()
        self.network = network
        self.policy = policy
        self.training = network.training
        self._accumulation = Accumulation()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network under its policy."""
        with self.scope() as mode:
            if mode is None:
                return self.network(*args, **kwargs)
            return self.run(mode, args, kwargs)

    def run(self, mode: CastMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the network inside a scope that is already open."""
        with converted_inputs(args, kwargs, mode.zones[-1].compute) as (inputs, named), mode:
            output = self.network(*inputs, **named)
        return to_float32(output)

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Make the casts active while a backward pass runs in a training loop of your own.

        Needed only where Python code of the network runs in backward: checkpointed parts that are computed again,
        hooks, autograd functions. A train network does this by itself.
        """
        with self.scope() as mode:
            if mode is None:
                yield
                return
            with in_backward(mode):
                yield

    def scope(self) -> AbstractContextManager[CastMode | None]:
        """Prepare the network for one step and give the mode that casts; None where nothing is cast."""
        if self.policy is None:
            return nullcontext()
        refuse_compiling()
        reason = why_not_native(device_of(self.network).type, self.policy.low)
        return cast_scope(self.network, self.policy, self._accumulation if reason else None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the network's own state, its names unchanged."""
        return self.network.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the network's own state."""
        return self.network.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}network.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Give the network's parameters under its own names."""
        return self.network.named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Find the network's own attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "network" or name.startswith("__"):
                raise
            return getattr(self.network, name)


@contextmanager
def in_backward(mode: CastMode) -> Iterator[None]:
    """Make a mode active for a backward pass."""
    mode.in_backward = True
    try:
        with mode, mode.backward_scope():
            yield
    finally:
        mode.in_backward = False


def precision_networks(network: nn.Module) -> list[PrecisionNetwork]:
    """Give the parts of a network, itself included, that already have a policy."""
    return [
        module
        for module in network.modules()
        if isinstance(module, PrecisionNetwork) and module.policy
    ]


def device_of(network: nn.Module) -> torch.device:
    """Give the device of the network's parameters; CPU when it has none."""
    parameter = next(network.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def checked_network(network: object) -> nn.Module:
    """Give the network, or raise TypeError."""
    if not isinstance(network, nn.Module):
        raise TypeError(refusal("network", "a torch.nn.Module", network))
    return network


def checked_level(level: object, where: str = "level") -> str:
    """Give the level's word: of another kind TypeError, unknown ValueError."""
    if not isinstance(level, str):
        raise TypeError(refusal(where, LEVEL_NAMES, level))
    if level not in LEVEL_NAMES:
        raise ValueError(refusal(where, LEVEL_NAMES, level))
    return level


def _checked_low(dtype: object) -> torch.dtype:
    allowed = "torch.float16 or torch.bfloat16"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(refusal("dtype", allowed, dtype))
    if dtype not in LOW_DTYPES:
        raise ValueError(refusal("dtype", allowed, dtype))
    return dtype


def refuse_twice(network: nn.Module, where: str) -> None:
    """Raise ValueError for a network that has a policy already."""
    if precision_networks(network):
        raise ValueError(
            f"{where}: the network already computes in mixed precision (it came from auto_mixed_precision or "
            "custom_mixed_precision); build it at level O0 without cast_model_type, or give the plain network"
        )


def refuse_low_storage(network: nn.Module) -> None:
    """Raise ValueError for parameters that are stored in low precision: a level casts when it computes."""
    for name, parameter in network.named_parameters():
        if parameter.dtype in LOW_DTYPES:
            raise ValueError(
                refusal(
                    f"network.{name}",
                    "stored in float32 (levels cast when they compute)",
                    str(parameter.dtype),
                )
            )


def under_policy(network: nn.Module, policy: Policy) -> PrecisionNetwork:
    """Put a plain network under a policy, or raise ValueError when it cannot be."""
    refuse_unseen(network)
    refuse_low_storage(network)
    return PrecisionNetwork(network, policy)


def auto_mixed_precision(
    network: nn.Module, amp_level: str = "O0", dtype: torch.dtype = torch.float16
) -> nn.Module:
    """Give a network that computes at a precision level.

    Args:
        network: a plain network; it is not changed, and the result trains its weights.
        amp_level: O0, O1, O2, O3 or auto. At O0 the network itself is returned.
        dtype: float16 or bfloat16.

    Returns:
        A network whose floating outputs are float32. Train it at level O0 of `build_train_network`, which then scales
        no loss: give the `loss_scale_manager` that you want, for O2 `DynamicLossScaleManager()`.

    Raises:
        TypeError: an argument of wrong kind.
        ValueError: an unknown level or dtype, a network that has a level already or whose operators cannot be seen.

    Source: `mindspore.amp.auto_mixed_precision`, which changes the network in place.

    """
    checked_network(network)
    checked_level(amp_level, "amp_level")
    _checked_low(dtype)
    refuse_twice(network, "auto_mixed_precision")
    level = resolve_level(amp_level, device_of(network).type)
    policy = level_policy(
        level, None, keep_batchnorm_fp32=LEVELS[level].keep_batchnorm_fp32, low=dtype
    )
    return network if policy is None else under_policy(network, policy)


def custom_mixed_precision(
    network: nn.Module,
    *,
    white_list: list[Any] | None = None,
    black_list: list[Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> nn.Module:
    """Give a network in which a list of your own decides.

    Args:
        network: a plain network; it is not changed, and the result trains its weights.
        white_list: module classes and functions that compute in `dtype`; all else float32.
        black_list: module classes and functions that stay float32; all else computes in `dtype`.
        dtype: float16 or bfloat16.

    Raises:
        TypeError: something that is no list of classes or functions.
        ValueError: both lists or none, a network that has a level already or whose operators cannot be seen.

    Source: `mindspore.amp.custom_mixed_precision`.

    """
    checked_network(network)
    if (white_list is None) == (black_list is None):
        came = "both" if white_list is not None else "neither"
        raise ValueError(
            f"custom_mixed_precision needs either white_list or black_list; got {came}"
        )
    _checked_low(dtype)
    refuse_twice(network, "custom_mixed_precision")
    if white_list is not None:
        return under_policy(network, white_listed(checked_list("white_list", white_list), dtype))
    return under_policy(network, black_listed(checked_list("black_list", black_list), dtype))
