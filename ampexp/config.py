"""AmpConfig: everything that a run is made of, complete, frozen and checked before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ampexp import faults as _faults
from ampexp.amp.levels import LEVELS, resolve_level
from ampexp.messages import UserError

if TYPE_CHECKING:
    from ampexp.amp.build import TrainNetwork

Count = Annotated[int, Field(ge=1)]
MOST_THREADS = 1024
"""Threads or processes that a run may ask for: with some ten thousand the system ends the process without a word."""

WholeNumber = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Scale = Annotated[float, Field(ge=1, le=3.4028234663852886e38)]  # what float32 can hold
AsTheLevelSays = Literal["level"]


class ConfigError(UserError, ValueError):
    """What is wrong with a config: `faults` holds one line each, and so does the text."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Pickle by the faults: a sweep's launcher may carry the error between processes."""
        return type(self), (self.faults,)


class Section(BaseModel):
    """A part of the config: frozen, no unknown keys, no conversion of types, no NaN and no inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Give the section as plain data, keys as in YAML."""
        return self.model_dump(by_alias=True)


class Target(Section):
    """Something to be made by `_target_`, a dotted name, with every other key as keyword argument."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=True)
    target: Text = Field(alias="_target_")


class OptionalTarget(Target):
    """A target that may be absent: `_target_: null`."""

    target: Text | None = Field(alias="_target_")  # type: ignore[assignment]


class LevelLossScale(Section):
    """The loss is scaled as the level says."""

    name: AsTheLevelSays


class NoLossScale(Section):
    """The loss is not scaled."""

    name: Literal["none"]


class FixedLossScale(Section):
    """One scale for the whole run."""

    name: Literal["fixed"]
    loss_scale: Scale
    drop_overflow_update: bool


class DynamicLossScale(Section):
    """A scale that adjusts itself."""

    name: Literal["dynamic"]
    init_loss_scale: Scale
    scale_factor: Annotated[float, Field(gt=1, le=3.4028234663852886e38)]
    scale_window: Count


class Trainer(Section):
    """How long, in which batches, and what is watched."""

    epochs: Count | None
    batch_size: Count
    eval_batch_size: Count
    warmup_steps: WholeNumber
    max_steps: Count | None
    held_fraction: Annotated[float, Field(ge=0, lt=1)]
    patience: WholeNumber
    clip_norm: Annotated[float, Field(gt=0)] | None
    num_workers: Annotated[int, Field(ge=0, le=MOST_THREADS)]
    log_every_steps: Count
    progress: Literal["auto", "bar", "lines", "none"]


class Tracker(Section):
    """Where the run is recorded."""

    name: Literal["mlflow", "none"]
    uri: Text | None
    experiment: Text
    run_name: Text | None
    log_model: bool


class Device(Section):
    """Which processor computes."""

    name: Literal["auto", "cpu", "cuda"]
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None
    cpu_loss_scaling: bool


class AmpConfig(Section):
    """Everything that a run is made of.

    There are no defaults here: they live in `conf/`, so that every value of a run is visible. Make one with
    `ampexp.compose`, or with `AmpConfig.parse` from a mapping that holds every key.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    level: Literal["O0", "O1", "O2", "O3", "auto"]
    boost_level: Literal["O0", "O1", "O2"]
    cast_model_type: Literal["level", "float16", "bfloat16", "float32"]
    keep_batchnorm_fp32: bool | AsTheLevelSays
    loss_scale_manager: Annotated[
        LevelLossScale | NoLossScale | FixedLossScale | DynamicLossScale, Field(discriminator="name")
    ]
    network: Target
    data: Target
    loss: OptionalTarget
    metric: OptionalTarget
    optimizer: Target
    scheduler: Target
    trainer: Trainer
    tracker: Tracker
    device: Device

    @classmethod
    def parse(cls, source: Mapping[str, Any] | DictConfig) -> AmpConfig:
        """Check a composed config.

        Raises ConfigError with all faults at once: unknown and missing keys, wrong types, values out of range,
        contradictions between fields.
        """
        values, found = _plain(source)
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            explained = _faults.explain(error.errors(include_url=False), _schema())
            known = {fault.path for fault in explained}
            found = [*(fault for fault in found if fault.path not in known), *explained]
        targets = [name for name, field in cls.model_fields.items() if field.annotation in (Target, OptionalTarget)]
        known = {fault.path for fault in found}
        said = [fault for name in targets for fault in _faults.of_target(values.get(name), name)]
        found += [fault for fault in said if fault.path not in known]
        found += _faults.contradictions(values, RULES, {fault.path for fault in found})
        if found:
            raise ConfigError([fault.text for fault in found])
        return config

    def to_yaml(self) -> str:
        """Give the config as YAML that reads back as the same config."""
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def amp_arguments(self) -> dict[str, Any]:
        """Give the keyword arguments of `ampexp.amp.build_train_network`; what is as the level says is left out."""
        given: dict[str, Any] = {
            "level": self.level,
            "boost_level": self.boost_level,
            "cpu_loss_scaling": self.device.cpu_loss_scaling,
        }
        if self.cast_model_type != "level":
            import torch

            given["cast_model_type"] = getattr(torch, self.cast_model_type)
        if self.keep_batchnorm_fp32 != "level":
            given["keep_batchnorm_fp32"] = self.keep_batchnorm_fp32
        if self.loss_scale_manager.name != "level":
            given["loss_scale_manager"] = self._loss_scale_manager()
        return given

    def _loss_scale_manager(self) -> Any:
        from ampexp.amp.loss_scale import DynamicLossScaleManager, FixedLossScaleManager

        match self.loss_scale_manager:
            case FixedLossScale(loss_scale=scale, drop_overflow_update=drop):
                return FixedLossScaleManager(scale, drop_overflow_update=drop)
            case DynamicLossScale(init_loss_scale=scale, scale_factor=factor, scale_window=window):
                return DynamicLossScaleManager(scale, factor, window)
        return None

    def build(self, network: Any, optimizer: Any, loss_fn: Any = None, scheduler: Any = None) -> TrainNetwork:
        """Build the train network of one's own objects as `ampexp.amp.build_train_network` does, with this config."""
        from ampexp.amp.build import build_train_network

        return build_train_network(network, optimizer, loss_fn, scheduler=scheduler, **self.amp_arguments())


def _needs_cpu_loss_scaling(device: str, allowed: bool, level: str, manager: Mapping[str, Any]) -> bool:
    if device != "cpu" or allowed:
        return False
    name = manager["name"]
    if name == "level":
        name = LEVELS[resolve_level(level, "cpu")].loss_scale_manager
    return name == "dynamic" or (name == "fixed" and manager["drop_overflow_update"])


RULES = (
    _faults.Rule(
        ("trainer.epochs", "trainer.max_steps"),
        lambda epochs, steps: epochs is None and steps is None,
        "trainer.epochs and trainer.max_steps are both null: one of them must say when the run ends",
    ),
    _faults.Rule(
        ("trainer.patience", "trainer.held_fraction"),
        lambda patience, held: patience > 0 and held == 0,
        "trainer.patience looks at the held part of the training set, and trainer.held_fraction=0 holds none: "
        "write trainer.patience=0, or a trainer.held_fraction above 0",
    ),
    _faults.Rule(
        ("tracker.name", "tracker.uri"),
        lambda name, uri: name == "none" and uri is not None,
        "tracker.uri says where to record, and tracker=none records nothing: write tracker=mlflow, or leave the uri",
    ),
    _faults.Rule(
        ("device.name", "device.cpu_loss_scaling", "level", "loss_scale_manager"),
        _needs_cpu_loss_scaling,
        "device.cpu_loss_scaling=false refuses a loss scale that skips steps on a CPU: write "
        "device.cpu_loss_scaling=true, loss_scale_manager=none, or loss_scale_manager=fixed with "
        "loss_scale_manager.drop_overflow_update=false",
    ),
)
"""What two fields cannot say together; a rule is asked only when all the fields that it reads are sound."""


@cache
def _schema() -> dict[str, Any]:
    return AmpConfig.model_json_schema()


def _plain(source: Mapping[str, Any] | DictConfig) -> tuple[dict[str, Any], list[_faults.Fault]]:
    """Copy the source into plain dicts and lists, and name what is no plain data or still open."""
    if isinstance(source, DictConfig):
        try:
            source = OmegaConf.to_container(source, resolve=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            path = str(getattr(error, "full_key", None) or "the config")
            raise ConfigError([f"{path} cannot be resolved: {_faults.one_line(error)}"]) from None
    if not isinstance(source, Mapping):
        raise ConfigError([_faults.refuse("the config", "a mapping", source)])
    found: list[_faults.Fault] = []
    try:
        return _faults.copy_plain(source, "", found), found
    except RecursionError:
        raise ConfigError(["the config holds itself, or is nested too deep"]) from None


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, with quotes around texts that OmegaConf would read as numbers (1e-3)."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)
