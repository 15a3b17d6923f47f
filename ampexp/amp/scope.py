"""When the casts are active: for one call of a network, after which nothing of them stays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ampexp.amp.cast import CastMode, no_autocast
from ampexp.amp.conversion import convert, is_floating
from ampexp.amp.policy import Policy, Zone
from ampexp.amp.unseen import refuse_untraceable
from ampexp.kernels.accumulate import Accumulation


@contextmanager
def cast_scope(
    network: nn.Module, policy: Policy, accumulation: Accumulation | None
) -> Iterator[CastMode]:
    """Prepare a network for one step under a policy and leave nothing behind.

    Inside, `with mode:` makes the casts active in this thread. Modules of another zone get hooks for this time only,
    and what the network set to a low-precision tensor is converted back when the scope ends.
    """
    mode = CastMode(policy, network, accumulation)
    handles = []
    before = {}
    for module in network.modules():
        if policy.modules and (zone := policy.zone_of(module)) is not None:
            handles += _zone_hooks(module, mode, zone)
        for name, buffer in module._buffers.items():
            if is_floating(buffer):
                before[module, name] = buffer.dtype
    try:
        with no_autocast(network.parameters()):  # backward's own operators would follow it too
            yield mode
    except Exception as error:
        refuse_untraceable(error)
        raise
    finally:
        for handle in handles:
            handle.remove()
        for module in network.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype is mode.low:
                    dtype = before.get((module, name), torch.float32)
                    module._buffers[name] = buffer.to(dtype)
            _widen_attributes(module, mode.low)


_MAY_HOLD_STATES = (Tensor, list, tuple)
_NO_STATES = frozenset((bool, int, float, str, type(None), dict, OrderedDict, set))  # told fast


def _widen_attributes(module: nn.Module, low: torch.dtype) -> None:
    """Store in float32 what the network keeps of its states: the next forward, at whatever level, casts it again."""
    for name, value in module.__dict__.items():
        if type(value) in _NO_STATES or not isinstance(value, _MAY_HOLD_STATES):
            continue
        states = (value,) if isinstance(value, Tensor) else value
        if any(isinstance(state, Tensor) and state.dtype is low for state in states):
            module.__dict__[name] = convert(value, torch.float32)


def _zone_hooks(module: nn.Module, mode: CastMode, zone: Zone) -> list[Any]:
    """Open a zone before the module's forward; close it behind and hand its output on.

    Hooks, since several threads may run one network: each takes away its own.
    """

    def enter(_: nn.Module, args: Any) -> None:
        if mode.is_active():
            mode.zones.append(zone)

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        if not mode.is_active():
            return None
        mode.zones.pop()
        with torch._C.DisableTorchFunction():  # to the mode the output has the dtype of the new zone already
            return convert(output, mode.zones[-1].compute)

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, prepend=True, always_call=True),
    ]
