"""The one door to Hydra's `instantiate`: words in, objects out, a user's mistake in one line."""

from __future__ import annotations

import inspect
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from ampexp.messages import UserError


def make(where: str, section: dict[str, Any], *args: Any, offered: dict[str, Any] | None = None) -> Any:
    """Make what a config section describes by `_target_`, its other keys as keyword arguments.

    `offered` holds arguments that are passed only when the target takes them. A target is code of the user's choice and
    runs with the user's rights.

    Raises:
        UserError: the target cannot be found, or refuses its arguments.
    """
    section = dict(section)
    if offered:
        names = _parameters(where, section["_target_"])
        section.update({key: value for key, value in offered.items() if key in names and key not in section})
    try:
        return hydra.utils.instantiate(section, *args, _convert_="all")
    except InstantiationException as error:
        raise _explained(where, section["_target_"], error) from error


def _parameters(where: str, target: str) -> set[str]:
    try:
        return set(inspect.signature(hydra.utils.get_object(target)).parameters)
    except (ImportError, ValueError, TypeError, AttributeError, InstantiationException) as error:
        raise UserError(f"{where}._target_={target} cannot be found: {_first_line(error)}") from error


def _explained(where: str, target: str, error: InstantiationException) -> Exception:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return UserError(f"{where}: {cause}")
    if str(error).startswith("Error locating target"):
        return UserError(f"{where}._target_={target} cannot be found: {_first_line(cause)}")
    return UserError(f"{where} ({target}) refuses its arguments: {type(cause).__name__}: {_first_line(cause)}")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
