"""The one door to Hydra's `instantiate`: words in, objects out, a user's mistake in one line."""

from __future__ import annotations

import importlib
import inspect
import traceback
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from ampexp.messages import UserError, nearest


def make(where: str, section: dict[str, Any], *args: Any, offered: dict[str, Any] | None = None) -> Any:
    """Make what a config section describes by `_target_`, its other keys as keyword arguments.

    `offered` holds arguments that are passed only when the target takes them. Containers arrive as plain dicts and
    lists unless the section says another `_convert_`. A target is code of the user's choice and
    runs with the user's rights.

    Raises:
        UserError: the target cannot be found, or refuses its arguments.
    """
    section = dict(section)
    if offered:
        names = _parameters(where, section["_target_"])
        section.update({key: value for key, value in offered.items() if key in names and key not in section})
    try:
        return hydra.utils.instantiate({"_convert_": "all", **section}, *args)
    except InstantiationException as error:
        raise _explained(where, section["_target_"], error) from error


def _parameters(where: str, target: str) -> set[str]:
    try:
        return set(inspect.signature(hydra.utils.get_object(target)).parameters)
    except (ImportError, ValueError, TypeError, AttributeError, InstantiationException) as error:
        raise UserError(f"{where}._target_={target} cannot be found: {_why(target)}") from error


def _explained(where: str, target: str, error: InstantiationException) -> Exception:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return UserError(f"{where}: {cause}")
    if str(error).startswith("Error locating target"):
        return UserError(f"{where}._target_={target} cannot be found: {_why(target)}")
    return UserError(f"{where} ({target}) refuses its arguments: {type(cause).__name__}: {_first_line(cause)}")


def _why(target: str) -> str:
    """Say why a dotted name leads to nothing: no such module, a module that fails, or no such name in it."""
    module, _, name = target.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return f"no module {error.name!r} here or among the installed packages"
        return f"importing {module} fails: {_first_line(error)}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {_first_line(error)}"
        return f"importing {module} fails: {said} ({frame.filename}:{frame.lineno})"
    names = [other for other in dir(found) if not inspect.ismodule(getattr(found, other, None))]
    return f"module {module} has no {name!r}{nearest(name, names)}"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
