"""Code whose operators cannot be seen: what is scripted, exported or compiled is refused, never run uncast."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import nn

# Of PyTorch's core: torch._dynamo itself takes seconds to import. The first gives None in a thread where torch.compile
# runs nothing.
_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_set_callback = torch._C._dynamo.eval_frame.set_eval_frame

_REFUSED = (
    "torch.compile, and what uses it (torch.cond, flex_attention), cannot trace the casts of a level; call the network "
    "and its parts uncompiled (loss_fn may be compiled), or build at O0"
)


class _Named(Protocol):
    def module_path(self) -> str:
        """Name the innermost module whose forward is running."""
        ...


def refuse_unseen(network: nn.Module) -> None:
    """Raise ValueError for parts whose operators cannot be seen: compiled, scripted or exported code."""
    for path, module in network.named_modules():
        if (kind := _unseen(module)) is not None:
            where = f"network.{path}" if path else "network"
            raise ValueError(
                f"{where} ({type(module).__name__}) is {kind}: its operators cannot be seen, so no level but O0 can "
                "cast them; give the Python module it was made from, or build at O0"
            )


def refuse_compiling(mode: _Named | None = None) -> None:
    """Raise RuntimeError in a call that torch.compile took over; `mode` names the module.

    It stands in front of every operator, so it does one thing. torch.compile runs it and traces nothing of it: no
    tensor and no part of torch is named here, and what `_torchdynamo_disable` marks is not inlined.
    """
    if _callback() is not None:
        raise RuntimeError(_compiling(mode))


vars(refuse_compiling).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REFUSED)


def refuse_untraceable(error: Exception) -> None:
    """Raise in one line the RuntimeError for which torch.compile gives a page, where the page is about our refusal.

    That is so where a graph must be whole: fullgraph=True and PyTorch's own control flow.
    """
    if type(error) is not RuntimeError and _REFUSED in str(error):
        raise RuntimeError(f"network: {_REFUSED}") from error


def refuse_compiled(network: nn.Module) -> None:
    """Raise RuntimeError in a step that torch.compile took over, or one of a compiled `train_network.network`.

    A step enters the scope of that network and then the plain network inside, so it would pass the compiled code by.
    """
    refuse_compiling()
    own = vars(network)
    if ("_compiled_call_impl" in own or "forward" in own) and _is_compiled(network):
        raise RuntimeError(f"train_network.network: {_REFUSED}")


def _compiling(mode: _Named | None) -> str:
    callback = _set_callback(None)  # what follows is not to be compiled either
    try:
        return f"{'network' if mode is None else mode.module_path()}: {_REFUSED}"
    finally:
        _set_callback(callback)


def _unseen(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule"
    if _is_compiled(module):
        return "compiled by torch.compile"
    if isinstance(module, torch.fx.GraphModule) and any(
        isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes
    ):
        return "an exported graph"
    for name, value in vars(module).items():
        for held in _held(value):
            if isinstance(held, torch.jit.ScriptFunction):
                return f"built on a ScriptFunction ({name})"
            if _is_compiled_function(held):
                return f"built on a function that torch.compile compiled ({name})"
    return None


def _is_compiled(module: nn.Module) -> bool:
    """Say whether a call of the module is compiled: by torch.compile(module), module.compile() or a decorator."""
    own, kind = vars(module), type(module)
    calls = (
        own.get(name, getattr(kind, name, None)) for name in ("forward", "_compiled_call_impl")
    )
    return any(map(_is_compiled_function, (*calls, kind.__call__, kind._call_impl)))


def _is_compiled_function(value: Any) -> bool:
    """Say whether torch.compile made a function; what torch.compiler.disable made runs as it is written."""
    while not isinstance(value, FunctionType):
        if isinstance(value, MethodType):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        else:
            return False
    marks = vars(value)
    return "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable")


def _held(value: Any) -> Iterator[Any]:
    """Give a value, and for a container what it holds."""
    values = [value]
    seen = set[int]()
    for value in values:  # grows: what a container holds
        yield value
        if isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            values += value.values() if isinstance(value, dict) else value
