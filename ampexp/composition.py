"""Hydra's composition: overrides in, AmpConfig out, with every mistake on the way said in one line."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.version import VersionBase, getbase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ampexp import option_files
from ampexp.config import AmpConfig, ConfigError
from ampexp.faults import one_line, refuse, spell
from ampexp.messages import nearest

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
PACKAGE = "ampexp.conf"
MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError)
"""What Hydra raises for a user's mistake."""


def compose(*overrides: str, config_dir: str | PathLike[str] | None = None) -> AmpConfig:
    """Compose and check a config; works in a notebook, twice in one process and inside another Hydra job.

    Raises ConfigError with the faults of all overrides and of what the rest composes to.
    """
    if bad := [word for word in overrides if not isinstance(word, str)]:
        raise ConfigError([refuse("an override", "a text such as 'level=O2'", word) for word in bad])
    faults, left = refusals(overrides, config_dir)
    while True:
        try:
            composed = _compose(left, config_dir)
            break
        except (*MISTAKES, OSError) as error:
            text, culprit = explain(error, left, config_dir)
            faults.append(text)
            if culprit is None:
                raise ConfigError(faults) from error
            left = _without(left, culprit)
    with _hydra_config(composed):
        hydra_node = composed.hydra
        with open_dict(composed):
            del composed["hydra"]
        try:
            config = parse(composed, hydra_node)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return config


def parse(composed: DictConfig, hydra_node: Any) -> AmpConfig:
    """Check what Hydra composed; `hydra_node` is its record of how. Raises ConfigError with all faults."""
    runtime = hydra_node.runtime
    faults = option_files.odd_scalars(runtime)
    if hydra_node.job.config_name == CONFIG_NAME:  # every group is in its defaults list, with one option or with many
        many = [group for group in option_files.groups() if group in composed and group not in runtime.choices]
        faults += [f"{group} takes one option, and a defaults list gives it several" for group in many]
    try:
        config = AmpConfig.parse(composed)
    except ConfigError as error:
        faults += error.faults
    said = "\n".join(faults)
    faults += [text for path, text in option_files.other_kinds(composed, runtime) if f"{path} " not in said]
    if faults:
        raise ConfigError(faults)
    return config


def refusals(
    overrides: Sequence[str], config_dir: str | PathLike[str] | None = None
) -> tuple[list[str], list[str]]:
    """Give what is wrong with overrides where Hydra is silent or crashes, and the overrides that are left.

    A group takes one word: of a list Hydra takes the last option without a word, at null it fails an assertion.
    """
    faults, left = [], list(overrides)
    folders = [] if config_dir is None else [Path(config_dir)]
    for word in overrides:
        try:
            override = OverridesParser.create().parse_override(word)
        except (HydraException, RecursionError) as error:
            faults.append(f"{spell(word)} is no override (key=value): {one_line(error)}")
            left = [other for other in left if other != word]
            continue
        group = override.key_or_group
        if group not in option_files.groups() or override.is_delete():
            continue
        for value in _values(override):
            if isinstance(value, str):
                continue
            text = refuse(group, option_files.options(group, *folders), value)
            if isinstance(value, list):
                text += f" (for one job each: -m {group}={','.join(map(str, value))})"
            faults.append(text)
            left = _without(left, word)
            break
    return faults, left


def _values(override: Override) -> list[Any]:
    """Give the values that an override gives or sweeps over; ranges and globs give none."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [] if override.is_sweep_override() else [value]
    return [item.text if isinstance(item, QuotedString) else item for item in values]


def _without(overrides: Sequence[str], culprit: str) -> list[str]:
    """Leave an override out, and what it is the ground of: the keys below a group that was not chosen."""
    key = culprit.lstrip("+~").partition("=")[0]
    return [word for word in overrides if word != culprit and not word.lstrip("+~").startswith(f"{key}.")]


def explain(
    error: BaseException, overrides: Sequence[str], config_dir: str | PathLike[str] | None
) -> tuple[str, str | None]:
    """Say Hydra's complaint in one line, and give the override that is to blame, if one is."""
    message = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if group:
            blamed = next((word for word in overrides if word.lstrip("+") == f"{group}={option}"), None)
            return refuse(group, list(error.options or ()) or "a group with options", option), blamed
        return f"there is no config {option!r} on the search path", None
    if found := re.match(r"Ambiguous value for argument '(.*?)'\n|Sweep parameters '(.*?)' requires", message):
        word = found[1] or found[2]
        return f"{word!r} is a sweep: add -m for one job each, or quote the value", word
    if found := re.match(r"Could not (?:override|append to config|delete from config)\D*?'(.*?)'", message):
        path = found[1].partition("=")[0]
        blamed = next((word for word in overrides if word.lstrip("+~").partition("=")[0] == path), None)
        if message.startswith("Could not override") and blamed:
            return _unknown_key(path, _without(overrides, blamed), config_dir), blamed
        return one_line(message), blamed
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: no YAML: {one_line(error.problem)}", None
    if isinstance(error, RecursionError):
        message = "it holds itself by an alias (&, *), or is nested too deep"
    if isinstance(error, RecursionError | UnicodeDecodeError | OSError) and (file := _read_file(error)):
        return f"{file} cannot be read: {one_line(message)}", None
    if isinstance(error.__cause__, OmegaConfBaseException):
        message = f"{message}: {error.__cause__}"
    blamed = next((word for word in overrides if word in message), None)
    return one_line(message) or type(error).__name__, blamed


def _read_file(error: BaseException) -> str | None:
    """Give the file that Hydra was reading when it raised; the error itself does not say."""
    return next(
        (
            frame.f_locals["full_path"]
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_name == "load_config" and "full_path" in frame.f_locals
        ),
        None,
    )


def _unknown_key(path: str, overrides: Sequence[str], config_dir: str | PathLike[str] | None) -> str:
    """Name the first unknown key of a dotted path, and the nearest one that there is."""
    chosen = [word for word in overrides if re.match(r"[\w/+@]+=", word)]
    try:
        node: Any = _compose(chosen, config_dir)
    except MISTAKES:
        return f"{path} is no known key"
    above = ""
    for key in path.split("."):
        if not isinstance(node, DictConfig):
            return f"{path} is no known key: {above} holds no keys"
        keys = [str(known) for known in node if known != "hydra"]
        if key not in keys:
            break
        node, above = OmegaConf.select(node, key, throw_on_missing=False), f"{above}.{key}".lstrip(".")
    text = f"{path} is no known key{nearest(key, keys)}; {above or 'the config'} takes {', '.join(keys)}"
    free = "_target_" in keys
    return f"{text} (a keyword argument of your own: +{path}=...)" if free else text


def _compose(overrides: Sequence[str], config_dir: str | PathLike[str] | None) -> DictConfig:
    """Compose with Hydra's own node, and leave Hydra's global state as it was."""
    words = list(overrides)
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError([f"config_dir must be a directory; {str(folder)!r} is none"])
        escaped = f"file://{folder}".replace("\\", "\\\\").replace("'", "\\'")
        words.append(f"hydra.searchpath=['{escaped}']")
    outer, base = GlobalHydra.instance().hydra, getbase()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module(PACKAGE, job_name="ampexp", version_base=VERSION_BASE):
            return hydra.compose(CONFIG_NAME, overrides=words, return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = outer
        VersionBase.instance().version_base = base


@contextmanager
def _hydra_config(composed: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` in a config mean the composed one, as it does in a job."""
    holder = HydraConfig.instance()
    outer = holder.cfg
    holder.set_config(copy.deepcopy(composed))
    try:
        yield
    finally:
        holder.cfg = outer
