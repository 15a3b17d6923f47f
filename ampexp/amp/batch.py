"""Batches: floating leaves are converted, containers keep their concrete type and their identity."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampexp.amp.conversion import rebuilt


class _Swaps:
    """Converted leaves put into a caller's own mutable containers, to be taken out again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.undo: list[tuple[Callable[[Any], None], Callable[[], Any], Any, Any]] = []

    def put(self, value: Any) -> Any:
        """Give the value to hand to the network."""
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, MutableMapping):
            for key in list(value):
                self._swap(value, key, value[key])
        elif isinstance(value, MutableSequence):
            for index, item in enumerate(value):
                self._swap(value, index, item)
        elif isinstance(value, tuple) and not isinstance(value, torch.Size):
            return _rebuilt_if_changed(value, [self.put(item) for item in value])
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _replaced_fields(value, self.put)
        return value

    def _swap(self, home: Any, key: Any, old: Any) -> None:
        new = self.put(old)
        if new is not old:
            home[key] = new
            self.undo.append(
                (lambda item: home.__setitem__(key, item), lambda: _get(home, key), old, new)
            )

    def restore(self) -> None:
        """Put the caller's own leaves back wherever the network did not write another one."""
        for put, get, old, new in reversed(self.undo):
            if get() is new:
                put(old)


def _get(home: Any, key: Any) -> Any:
    try:
        return home[key]
    except (KeyError, IndexError):
        return None


def _rebuilt_if_changed(value: tuple[Any, ...], items: list[Any]) -> Any:
    return (
        value
        if all(new is old for new, old in zip(items, value, strict=True))
        else rebuilt(value, items)
    )


def _replaced_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a dataclass with changed fields, frozen or not, without running its constructor again."""
    fields = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)
    }
    changed = {name: new for name, old in fields.items() if (new := change(old)) is not old}
    if not changed:
        return value
    value = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(value, name, new)
    return value


@contextmanager
def converted_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Hand floating leaves to the network in `dtype`; integers, booleans, complex numbers, foreign objects stay.

    Dicts and lists stay the caller's own objects, so what the network writes into them is seen; their leaves are put
    back afterwards. Tuples, named tuples and dataclasses are rebuilt as the same type.
    """
    swaps = _Swaps(dtype)
    try:
        yield (
            tuple(swaps.put(arg) for arg in args),
            {key: swaps.put(value) for key, value in kwargs.items()},
        )
    finally:
        swaps.restore()


def to_float32(value: Any) -> Any:
    """Convert the floating leaves of an output to float32: dicts and lists in place, other containers rebuilt."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, MutableMapping):
        for key in list(value):
            if (new := to_float32(value[key])) is not value[key]:
                value[key] = new
    elif isinstance(value, MutableSequence):
        for index, item in enumerate(value):
            if (new := to_float32(item)) is not item:
                value[index] = new
    elif isinstance(value, tuple) and not isinstance(value, torch.Size):
        return _rebuilt_if_changed(value, [to_float32(item) for item in value])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replaced_fields(value, to_float32)
    return value


def first_floating(value: Any) -> Tensor | None:
    """Give the first floating tensor in an output, if any."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, MutableMapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := first_floating(item)) is not None), None)
    return None
