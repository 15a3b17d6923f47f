from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError

import ampexp
from ampexp.amp.levels import CAST_MODEL_TYPES, LEVEL_NAMES, LOSS_SCALE_MANAGERS
from ampexp.boost.levels import BOOST_LEVELS
from ampexp.config import RULES, AmpConfig, ConfigError
from ampexp.tracking import TRACKERS

GOLDEN = Path(__file__).parent / "golden"
BASE = ampexp.compose().to_dict()
MANAGERS: dict[str, dict[str, Any]] = {
    "default": {"name": "level"},
    "none": {"name": "none"},
    "fixed_keep": {"name": "fixed", "loss_scale": 64.0, "drop_overflow_update": False},
    "fixed_drop": {"name": "fixed", "loss_scale": 64.0, "drop_overflow_update": True},
    "dynamic": {"name": "dynamic", "init_loss_scale": 64.0, "scale_factor": 2, "scale_window": 2000},
}


def leaves(node: dict[str, Any], above: str = "") -> list[str]:
    return [
        path
        for key, value in node.items()
        for path in (leaves(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"])
    ]


def change(values: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(BASE)
    for path, value in values.items():
        *sections, key = path.split(".")
        node = changed
        for section in sections:
            node = node[section]
        node[key] = value
    return changed


def faults(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        AmpConfig.parse(change(values))
    assert str(caught.value).splitlines() == caught.value.faults
    return caught.value.faults


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("level", "o2", "level must be one of O0, O1, O2, O3, auto; got 'o2' (did you mean O2?)"),
        ("level", None, "got null"),
        ("level", ["O1", "O2"], "got ['O1', 'O2']"),
        ("boost_level", False, "a word is put in quotes"),
        ("cast_model_type", "fp16", "level, float16, bfloat16, float32; got 'fp16'"),
        ("keep_batchnorm_fp32", "off", "one of true, false, level; got 'off' (write false)"),
        ("keep_batchnorm_fp32", 1, "one of true, false, level; got 1"),
        ("loss_scale_manager", None, "got null (write none)"),
        ("loss_scale_manager.name", None, "one of dynamic, fixed, level, none; got null (write none)"),
        ("loss_scale_manager.name", "dinamic", "(did you mean dynamic?)"),
        ("seed", True, "got true (YAML reads yes, on as true and no, off as false)"),
        ("seed", -1, "an integer of at least 0 and below 4294967296; got -1"),
        ("seed", "010", "got '010' (a text is no number: write 10)"),
        ("trainer.epochs", 3.0, "got 3.0 (write 3)"),
        ("trainer.epochs", "null", "(write null)"),
        ("trainer.batch_size", "64", "an integer of at least 1; got '64' (a text is no number: write 64)"),
        ("trainer.batch_size", "2**6", "write 64"),
        ("trainer.batch_size", "1_000", "write 1000"),
        ("trainer.held_fraction", 1, "a finite number of at least 0 and below 1; got 1"),
        ("trainer.held_fraction", math.nan, "got nan"),
        ("trainer.clip_norm", math.inf, "a finite number above 0 or null; got inf"),
        ("trainer.progress", False, "got false"),
        ("tracker.run_name", 12, "got 12 (put it in quotes)"),
        ("tracker.experiment", "", "a text that is not empty; got ''"),
        ("tracker.log_model", "yes", "true or false; got 'yes' (write true)"),
        ("device", None, "a section with keys of its own; got null"),
        ("network._target_", None, "a text that is not empty; got null"),
        ("network.width", object(), "plain data (a text, number, boolean, null, list or mapping)"),
        ("network.width", "2**24", "YAML does not calculate; got '2**24' (a text is no number: write 16777216 or"),
        ("network.width", "???", "must be given"),
        ("trainer.epoch", 3, "trainer.epoch is no known key (did you mean epochs?); trainer takes epochs, batch_size"),
        ("zap", 3, "zap is no known key"),
        ("device.threads", 1025, "an integer of at least 1 and of at most 1024 or null; got 1025"),
        ("trainer.num_workers", 100_000, "an integer of at least 0 and of at most 1024; got 100000"),
        ("network._recursive_", "x", "network._recursive_ must be true or false; got 'x'"),
        ("network._partial_", 1, "network._partial_ must be true or false; got 1"),
        ("loss._args_", 1, "loss._args_ must be a list; got 1"),
        ("metric._convert_", "foo", "metric._convert_ must be one of none, partial, object, all; got 'foo'"),
        ("optimizer._convert", "all", "(did you mean _convert_?); with an underscore in front optimizer takes"),
        ("network._width", 1, "network._width is no known key"),
        ("network.parts", [{"_target_": "a.B", "_partial_": "x"}], "network.parts[0]._partial_ must be true or false"),
        ("network.part", {"_recursive_": None}, "network.part._recursive_ must be true or false; got null"),
    ],
)
def test_says_where_what_is_allowed_and_what_came(path: str, value: object, said: str) -> None:
    (fault,) = faults({path: value})
    assert fault.startswith(path)
    assert said in fault


def test_what_hydra_takes_beside_a_target_is_taken() -> None:
    taken = {"_args_": [1], "_partial_": False, "_recursive_": False, "_convert_": "object"}
    given = {**taken, "_target_": "a.B", "plain": {"_my_own": 1}, "part": {"_target_": "c.D", **taken}}
    assert AmpConfig.parse(change({"network": given})).network.to_dict() == given


def test_a_config_that_holds_itself() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert faults({"network.width": itself}) == ["the config holds itself, or is nested too deep"]


def test_big_scale_in_words_of_arithmetic() -> None:
    values = {"loss_scale_manager": {**MANAGERS["dynamic"], "init_loss_scale": "2**24"}}
    (fault,) = faults(values)
    assert fault.endswith("got '2**24' (a text is no number: write 16777216 or 1.6777216e7)")


def test_all_faults_at_once() -> None:
    wrong = {"level": 1, "seed": "x", "trainer.epochs": 0, "trainer.epoch": 1, "tracker.uri": 3, "device.name": "gpu"}
    said = faults({**wrong, "trainer.patience": 2, "trainer.held_fraction": 0.0})
    assert len(said) == len(wrong) + 1
    for path in wrong:
        assert sum(fault.startswith(f"{path} ") for fault in said) == 1


def test_a_missing_key_is_named() -> None:
    values = copy.deepcopy(BASE)
    del values["level"], values["trainer"]["epochs"]
    with pytest.raises(ConfigError) as caught:
        AmpConfig.parse(values)
    assert caught.value.faults == [
        "level is missing: it must be one of O0, O1, O2, O3, auto",
        "trainer.epochs is missing: it must be an integer of at least 1 or null",
    ]


def test_the_words_are_those_of_the_tables() -> None:
    def words(field: str) -> tuple[str, ...]:
        return get_args(AmpConfig.model_fields[field].annotation)

    assert words("level") == LEVEL_NAMES
    assert words("boost_level") == tuple(BOOST_LEVELS)
    assert words("cast_model_type") == ("level", *CAST_MODEL_TYPES)
    managers = get_args(AmpConfig.model_fields["loss_scale_manager"].annotation)
    assert {get_args(kind.model_fields["name"].annotation)[0] for kind in managers} == {"level", *LOSS_SCALE_MANAGERS}
    trackers = AmpConfig.model_fields["tracker"].annotation
    assert trackers is not None
    assert get_args(trackers.model_fields["name"].annotation) == TRACKERS


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"trainer.epochs": None}, "trainer.max_steps are both null"),
        ({"trainer.patience": 1, "trainer.held_fraction": 0}, "holds none"),
        ({"tracker.name": "none", "tracker.uri": "sqlite:///x.db"}, "tracker=none records nothing"),
        ({"level": "O2", "device.name": "cpu", "device.cpu_loss_scaling": False}, "device.cpu_loss_scaling=true, loss"),
    ],
)
def test_contradictions(values: dict[str, Any], said: str) -> None:
    (fault,) = faults(values)
    assert said in fault
    for path in values:
        rest = {other: value for other, value in values.items() if other != path}
        AmpConfig.parse(change(rest))  # without any one of them there is none


def test_every_rule_reads_fields_that_exist() -> None:
    for rule in RULES:
        for field in rule.fields:
            node: Any = BASE
            for key in field.split("."):
                node = node[key]


def test_golden_combinations_on_the_cpu() -> None:
    """Without the opt-in a CPU refuses what mindspore.amp refuses there, and nothing else."""
    records = json.loads((GOLDEN / "cpu_errors.json").read_text())
    tried = 0
    for record in records:
        known = record["level"] in LEVEL_NAMES and record["boost_level"] in BOOST_LEVELS
        if not known or record["loss_scale_manager"] not in MANAGERS:
            continue
        tried += 1
        values = change(
            {
                "level": record["level"], "boost_level": record["boost_level"], "device.name": "cpu",
                "device.cpu_loss_scaling": False, "loss_scale_manager": MANAGERS[record["loss_scale_manager"]],
            }
        )  # fmt: skip
        if record["result"].startswith("ok:"):
            AmpConfig.parse(values)
        else:
            with pytest.raises(ConfigError, match="cpu_loss_scaling"):
                AmpConfig.parse(values)
    assert tried >= 30


def test_overrides_of_a_level_are_no_contradiction() -> None:
    casts = ("level", *CAST_MODEL_TYPES)
    for level, cast, keep, manager in itertools.product(LEVEL_NAMES, casts, ("level", True, False), MANAGERS.values()):
        values = {"level": level, "cast_model_type": cast, "keep_batchnorm_fp32": keep}
        config = AmpConfig.parse(change({**values, "loss_scale_manager": manager}))
        given_words = set(config.amp_arguments()) - {"level", "boost_level", "cpu_loss_scaling"}
        expected = {"cast_model_type"} if cast != "level" else set()
        expected |= {"keep_batchnorm_fp32"} if keep != "level" else set()
        expected |= {"loss_scale_manager"} if manager["name"] != "level" else set()
        assert given_words == expected


def test_amp_arguments_are_those_of_the_api() -> None:
    import torch

    from ampexp.amp import DynamicLossScaleManager, FixedLossScaleManager

    config = AmpConfig.parse(
        change({"cast_model_type": "bfloat16", "loss_scale_manager": MANAGERS["fixed_keep"], "level": "O3"})
    )
    arguments = config.amp_arguments()
    assert arguments["cast_model_type"] is torch.bfloat16
    assert arguments["level"] == "O3"
    manager = arguments["loss_scale_manager"]
    assert isinstance(manager, FixedLossScaleManager)
    assert (manager.get_loss_scale(), manager.get_drop_overflow_update()) == (64.0, False)
    dynamic = AmpConfig.parse(change({"loss_scale_manager": MANAGERS["dynamic"]})).amp_arguments()["loss_scale_manager"]
    assert isinstance(dynamic, DynamicLossScaleManager)
    assert dynamic.get_loss_scale() == 64.0
    none = AmpConfig.parse(change({"loss_scale_manager": MANAGERS["none"]})).amp_arguments()
    assert none["loss_scale_manager"] is None


def test_build_trains_ones_own_objects() -> None:
    import torch

    network = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    config = AmpConfig.parse(change({"level": "O2"}))
    step = config.build(network, optimizer, torch.nn.MSELoss())
    before = network.weight.detach().clone()
    output = step(torch.ones(4, 3), torch.ones(4, 1))
    assert output.loss_scale > 1  # O2 in full: its loss is scaled, on the CPU too
    for _ in range(30):
        step(torch.ones(4, 3), torch.ones(4, 1))
    assert not torch.equal(network.weight, before)


def test_the_config_is_frozen() -> None:
    config = AmpConfig.parse(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        config.level = "O2"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.epochs = 2  # type: ignore[misc]
    assert config.level == BASE["level"]


def test_a_fault_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert (error.faults, str(error)) == (["a", "b"], "a\nb")


def test_a_parsed_config_shares_nothing_with_its_source() -> None:
    source = change({"network.sizes": [1, 2]})
    config = AmpConfig.parse(source)
    source["network"]["sizes"].append(3)
    assert config.network.to_dict()["sizes"] == [1, 2]


TEXTS = st.sampled_from(
    ["", "off", "yes", "no", "null", "~", "2**24", "010", "1:30", "1_000", "1e-3", "64", "nan", ".inf", "O2", "auto",
     "level", "none", "a\nb", "é", "x" * 500, "???", "true", "0x10"]
) | st.text(max_size=8)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
FIELDS = st.sampled_from([*leaves(BASE), *BASE, "trainer.new", "network.new", "new"])


@given(st.dictionaries(FIELDS, VALUES | st.binary(max_size=2), min_size=1, max_size=3))
def test_any_value_parses_or_gives_lines_that_name_the_field(values: dict[str, Any]) -> None:
    changed = copy.deepcopy(BASE)
    for path, value in sorted(values.items(), key=lambda item: item[0].count("."), reverse=True):
        section, _, key = path.rpartition(".")
        (changed[section] if section else changed)[key] = value
    config, said = None, []
    try:
        config = AmpConfig.parse(changed)
    except ConfigError as error:
        said = error.faults
    assert (config is None) == bool(said)
    for fault in said:
        assert len(fault.splitlines()) == 1
        assert len(fault) < 600
        assert "pydantic" not in fault.lower()
        assert any(path.partition(".")[0] in fault for path in values)
    if config is not None:
        assert AmpConfig.parse(yaml.safe_load(config.to_yaml())).to_yaml() == config.to_yaml()


@given(st.lists(SCALARS.filter(lambda value: value != "???"), max_size=5))
def test_yaml_reads_back_as_the_same(kept: list[Any]) -> None:
    values = change({"network.kept": [item for item in kept if not isinstance(item, str) or "**" not in item]})
    config = AmpConfig.parse(values)
    read = AmpConfig.parse(yaml.safe_load(config.to_yaml()))
    assert repr(read) == repr(config)  # nan is not equal to itself, its spelling is


def test_omegaconf_reads_texts_that_look_like_numbers_as_texts() -> None:
    config = AmpConfig.parse(change({"network.kept": ["1e-3", "1e5", "010", "yes", "1:30"]}))
    assert AmpConfig.parse(OmegaConf.create(config.to_yaml())) == config


def test_interpolations_are_resolved_or_named() -> None:
    config = OmegaConf.create(BASE)
    config.trainer.eval_batch_size = "${trainer.batch_size}"
    assert AmpConfig.parse(config).trainer.eval_batch_size == BASE["trainer"]["batch_size"]
    config.trainer.eval_batch_size = "${trainer.size}"
    with pytest.raises(ConfigError, match=r"^trainer.eval_batch_size cannot be resolved: "):
        AmpConfig.parse(config)
