"""The YAML files of the groups: their options, their first comments, and what YAML reads otherwise than meant."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ampexp.faults import join, one_line, refuse, spell

FREE_SECTIONS = ("network", "data", "loss", "metric", "optimizer", "scheduler")
"""The sections whose keys are keyword arguments of a `_target_`."""

ODD_SCALAR = re.compile(r"[-+]?(?:0[0-9_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
"""Plain scalars that YAML 1.1 reads otherwise than they look: 010 is eight, 1:30 is ninety."""


@cache
def home() -> Path:
    """Give the directory of the package's own config groups."""
    return Path(str(resources.files("ampexp.conf")))


def groups() -> list[str]:
    """Name the package's groups in the order of `config.yaml`."""
    return list(re.findall(r"^  - (\w+):", (home() / "config.yaml").read_text("utf-8"), flags=re.MULTILINE))


def options(group: str, *folders: Path) -> list[str]:
    """Name the options of a group, the package's and those of further folders."""
    found = {path.stem for folder in (home(), *folders) for path in (folder / group).glob("*.yaml") if path.is_file()}
    return sorted(found, key=lambda name: (name != "level", name))


def meaning(path: Path) -> str:
    """Give a file's first comment that is a sentence, and nothing when there is none."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
    for line in lines:
        text = line.lstrip("#").strip()
        if line.startswith("#") and text and not text.startswith("@"):
            return text
        if not line.startswith("#"):
            break
    return ""


def _folders(runtime: Mapping[str, Any]) -> Iterator[tuple[Path, bool]]:
    """Give the directories that a composition read from, and whether one is a user's."""
    for source in runtime["config_sources"]:
        if source["schema"] == "file":
            yield Path(source["path"]), True
        elif source["schema"] == "pkg" and source["path"] == "ampexp.conf":
            yield home(), False


def _chosen(runtime: Mapping[str, Any]) -> Iterator[tuple[str, Path, bool]]:
    """Give group, file and whether the file is a user's, for every chosen option."""
    for group, option in runtime["choices"].items():
        for folder, own in _folders(runtime):
            path = folder / group / f"{option}.yaml"
            if isinstance(option, str) and path.is_file():
                yield group, path, own
                break


def odd_scalars(runtime: Mapping[str, Any]) -> list[str]:
    """Refuse numbers in users' files that YAML reads otherwise than they look, with file and line."""
    files = [path for _, path, own in _chosen(runtime) if own]
    files += [path for folder, own in _folders(runtime) if own and (path := folder / "config.yaml").is_file()]
    faults: list[str] = []
    for path in files:  # grows: what a file names in its own defaults list is read as well
        try:
            files += [base for base in _bases(path) if base not in files]
            faults += _odd_in(path)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:  # a config.yaml that Hydra does not read
            faults.append(f"{path} cannot be read: {one_line(error)}")
    return faults


def _bases(path: Path) -> list[Path]:
    """Give the files beside this one that its defaults list names."""
    held = yaml.safe_load(path.read_text("utf-8"))
    names = held.get("defaults") if isinstance(held, Mapping) else None
    named = [name for name in (names if isinstance(names, list) else []) if isinstance(name, str) and name != "_self_"]
    return [base for name in named if (base := path.parent / f"{name}.yaml").is_file()]


def _odd_in(path: Path) -> Iterator[str]:
    for token in yaml.scan(path.read_text("utf-8"), Loader=yaml.SafeLoader):
        if isinstance(token, yaml.ScalarToken) and token.plain and ODD_SCALAR.fullmatch(token.value):
            read = yaml.safe_load(token.value)
            said = "a text" if isinstance(read, str) else spell(read)
            meant = token.value.replace("_", "").lstrip("+-0") or "0"
            ways = f"'{token.value}'" if ":" in token.value else f"{meant} or '{token.value}'"
            yield f"{path}, line {token.start_mark.line + 1}: YAML reads {token.value} as {said}: write {ways}"


def other_kinds(config: DictConfig, runtime: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse what is of another kind than the option's file holds, where keys are free: give each path and its fault.

    Only numbers and booleans are held to their kind: `optimizer.lr=off` is no learning rate of zero.
    """
    for group, path, _ in _chosen(runtime):
        if group in FREE_SECTIONS:
            held = yaml.safe_load(path.read_text("utf-8"))
            yield from _compare(held, OmegaConf.select(config, group), group, f"{group}/{path.name}")


def _compare(held: Any, given: Any, where: str, file: str) -> Iterator[tuple[str, str]]:
    if isinstance(held, Mapping) and isinstance(given, DictConfig):
        for key in held:
            with suppress(OmegaConfBaseException):  # what cannot be resolved is said elsewhere
                yield from _compare(held[key], given.get(key), join(where, str(key)), file)
    elif given is None:
        return
    elif isinstance(held, bool):
        if not isinstance(given, bool):
            yield where, f"{refuse(where, 'true or false', given)}, as {file} holds one"
    elif isinstance(held, int | float) and not (
        isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    ):
        yield where, f"{refuse(where, 'a finite number', given)}, as {file} holds one"
