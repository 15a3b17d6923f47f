from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase

import ampexp
from ampexp import help, option_files
from ampexp.amp.levels import LEVELS, RECOMMENDED
from ampexp.boost.levels import BOOST_LEVELS, NOTES
from ampexp.composition import refusals
from ampexp.config import ConfigError


def faults(*overrides: str, config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ampexp.compose(*overrides, config_dir=config_dir)
    assert all(len(fault.splitlines()) == 1 for fault in caught.value.faults)
    return caught.value.faults


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Give a user's config directory, with a name that needs quotes."""
    folder = tmp_path / "my 'own', configs"
    (folder / "network").mkdir(parents=True)
    (folder / "network" / "mine.yaml").write_text("# My own.\n_target_: mine.Net\nwidth: 8\ngate: false\n")
    return folder


@pytest.mark.parametrize("group", option_files.groups())
def test_every_option_composes_and_is_explained(group: str) -> None:
    names = option_files.options(group)
    assert names
    written = help.text({}, [])
    for name in names:
        config = ampexp.compose(f"{group}={name}")
        chosen = config.to_dict()[group]
        if isinstance(chosen, str):
            assert chosen == name
        said = option_files.meaning(option_files.home() / group / f"{name}.yaml")
        assert len(said.split()) > 1
        assert said.split()[0] in written


def test_the_comments_say_what_the_tables_say() -> None:
    for name, level in LEVELS.items():
        assert option_files.meaning(option_files.home() / "level" / f"{name}.yaml") == level.meaning
    said = option_files.meaning(option_files.home() / "level" / "auto.yaml")
    assert all(f"{device} {level}" in said for device, level in RECOMMENDED.items())
    for name, boosts in BOOST_LEVELS.items():
        said = option_files.meaning(option_files.home() / "boost_level" / f"{name}.yaml")
        assert ", ".join(boosts) in said
        assert NOTES.get(name, "") in said


def test_words_of_the_command_line_arrive() -> None:
    config = ampexp.compose("level=O2", "boost_level=O1", "trainer.epochs=3", "optimizer.lr=0.5", "+network.extra=a")
    assert (config.level, config.boost_level, config.trainer.epochs) == ("O2", "O1", 3)
    assert config.optimizer.to_dict()["lr"] == 0.5
    assert config.network.to_dict()["extra"] == "a"
    assert ampexp.compose("trainer.batch_size=1_000").trainer.batch_size == 1000
    assert ampexp.compose("tracker.run_name='12'").tracker.run_name == "12"


def test_twice_in_one_process_and_inside_another_hydra_app() -> None:
    assert ampexp.compose("level=O2") == ampexp.compose("level=O2")
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_module("ampexp.conf", version_base="1.2"):
        base = getbase()
        assert ampexp.compose("level=O3").level == "O3"
        faults("level=O7")
        assert getbase() == base
        assert compose("config", overrides=["level=O1"]).level == "O1"
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("group", option_files.groups())
@pytest.mark.parametrize("value", ["[O1,O2]", "[]", "null", "3", "true", "{a: 1}"])
def test_a_group_takes_one_word(group: str, value: str) -> None:
    (fault,), left = refusals([f"{group}={value}", f"{group}.below=1", "seed=1"])
    assert fault.startswith(f"{group} must be one of {', '.join(option_files.options(group))}; got ")
    assert left == ["seed=1"]


def test_hints_for_groups() -> None:
    assert faults("level=[O1,O2]")[0].endswith("got ['O1', 'O2'] (for one job each: -m level=O1,O2)")
    assert faults("loss_scale_manager=null")[0].endswith("got null (write none)")
    assert faults("level=o2")[0].endswith("got 'o2' (did you mean O2?)")
    assert faults("level=O1,O2") == ["'level=O1,O2' is a sweep: add -m for one job each, or quote the value"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=off", "optimizer.lr must be a finite number; got 'off'"),
        ("optimizer.lr=true", "optimizer.lr must be a finite number; got true"),
        ("optimizer.lr=nan", "optimizer.lr must be a finite number; got nan"),
        ("optimizer.lr=010", "got '010' (a text is no number: write 10)"),
        ("optimizer.lr=2**-4", "(a text is no number: write 0.0625)"),
        ("optimizer.nesterov=1", "optimizer.nesterov must be true or false; got 1"),
        ("optimizer.nesterov=off", "got 'off' (write false)"),
        ("network.widht=3", "(a keyword argument of your own: +network.widht=...)"),
        ("trainer.epoch=3", "trainer.epoch is no known key (did you mean epochs?)"),
        ("trainr.epochs=3", "trainr.epochs is no known key (did you mean trainer?)"),
        ("loss_scale_manager.loss_scale=3", "loss_scale_manager takes name"),
        ("+trainer.epoch=3", "trainer.epoch is no known key (did you mean epochs?)"),
        ("level", "'level' is no override (key=value)"),
        ("seed=[", "'seed=[' is no override (key=value)"),
        ("~level", "level is missing: it must be one of O0"),
        ("level=", "level must be one of O0, O1, O2, O3, auto; got ''"),
        ("network._target_=null", "network._target_ must be a text"),
        ("seed=${nothing}", "seed cannot be resolved"),
    ],
)
def test_mistakes_in_one_override(override: str, said: str) -> None:
    (fault,) = faults(override)
    assert said in fault


def test_mistakes_of_every_kind_at_once() -> None:
    wrong = ["level=O9", "boost_level=null", "trainer.epoch=3", "seed=x", "optimizer.lr=off", "tracker.experiment="]
    said = faults(*wrong, "network=lenet", "network.classes=3")
    assert len(said) == len(wrong) + 1  # what lies below the unknown network is not said apart


def test_ones_own_directory(own: Path) -> None:
    config = ampexp.compose("network=mine", "network.width=9", config_dir=own)
    assert config.network.to_dict() == {"_target_": "mine.Net", "width": 9, "gate": False}
    assert faults("network=mine", "network.gate=0", config_dir=own) == [
        "network.gate must be true or false; got 0, as network/mine.yaml holds one"
    ]
    assert "mine" in faults("network=mien", config_dir=own)[0]
    assert faults(config_dir=own / "none")[0].startswith("config_dir must be a directory")


def test_numbers_that_yaml_reads_otherwise_are_refused_with_file_and_line(own: Path) -> None:
    odd = own / "network" / "odd.yaml"
    odd.write_text("_target_: x.Y\nwidth: 010\nwords: ['010', \"1:30\", 2020-01-01, 1_000]\ntimes:\n  - 1:30\n")
    assert faults("network=odd", config_dir=own) == [
        f"{odd}, line 2: YAML reads 010 as 8: write 10 or '010'",
        f"{odd}, line 5: YAML reads 1:30 as 90: write '1:30'",
    ]
    (own / "network" / "on_odd.yaml").write_text("defaults: [odd]\n")
    assert len(faults("network=on_odd", config_dir=own)) == 2
    ampexp.compose("network=mine", config_dir=own)  # a file that is not used is not read


def test_files_of_ones_own_that_are_no_yaml_or_choose_two_options(own: Path) -> None:
    broken = own / "network" / "broken.yaml"
    broken.write_text("_target_: [x\n")
    assert faults("network=broken", config_dir=own)[0].startswith(f"{broken}, line 2: no YAML: ")
    (own / "more").mkdir()
    (own / "more" / "two.yaml").write_text("# @package _global_\ndefaults:\n  - override /level: [O1, O2]\n")
    assert faults("+more=two", config_dir=own) == ["level takes one option, and a defaults list gives it several"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "cannot be read: 'utf-8' codec can't decode"),
        (b"_target_: x.Y\nwidth: \xe9\n", "cannot be read: 'utf-8' codec can't decode"),
        (b"\x01\x02\x00", "special characters are not allowed"),
        (b"_target_: x.Y\na: &a [*a]\n", "cannot be read: it holds itself by an alias"),
        (b"_target_: x.Y\na: " + b"[" * 2000 + b"]" * 2000, "cannot be read: it holds itself by an alias (&, *)"),
        (b"3", "cannot be read: Invalid loaded object type"),
    ],
)
def test_files_that_cannot_be_read_are_named(content: bytes, said: str, own: Path) -> None:
    broken = own / "network" / "broken.yaml"
    broken.write_bytes(content)
    (fault,) = faults("network=broken", config_dir=own)
    assert str(broken) in fault
    assert said in fault
    ampexp.compose(config_dir=own)  # a file that is not used is not read


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff", "cannot be read: 'utf-8'"), (b"a: [", "cannot be read"), (b"defaults: 3\na: 010", "YAML reads 010")],
)
def test_a_config_file_of_ones_own_that_cannot_be_read(content: bytes, said: str, own: Path) -> None:
    (own / "config.yaml").write_bytes(content)
    (fault,) = faults(config_dir=own)
    assert str(own / "config.yaml") in fault
    assert said in fault


def test_an_override_that_is_nested_too_deep() -> None:
    (fault,) = faults(f"seed={'[' * 2000}{']' * 2000}")
    assert "is no override (key=value)" in fault


def test_the_help_shows_what_can_be_chosen_and_fails_on_nothing(own: Path) -> None:
    network = own / "network"
    (network / "latin.yaml").write_bytes(b"# R\xe9seau.\n_target_: x.Y\n")
    (network / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (network / "folder.yaml").mkdir()
    (network / "dangling.yaml").symlink_to("nowhere")
    (network / os.fsdecode(b"\xff.yaml")).write_text("# A name that is no UTF-8.\n")
    (own / "empty" / "folder.yaml").mkdir(parents=True)
    written = help.text({}, [own])
    lines = written.encode("utf-8").decode().splitlines()
    for shown in ("latin                R\ufffdseau.", "binary", "mine                 My own."):
        assert f"  {shown}" in lines
    for hidden in ("folder", "dangling", "empty"):
        assert hidden not in written


def test_nothing_heavy_is_imported() -> None:
    checks = """
import sys, ampexp
assert not {"torch", "mlflow", "hydra", "omegaconf", "pydantic", "numpy"} & set(sys.modules), "import ampexp"
config = ampexp.compose("level=O2", "cast_model_type=bfloat16")
config.to_yaml()
try:
    ampexp.compose("level=O7", "trainer.epochs=x", "optimizer.lr=off")
except ampexp.ConfigError as error:
    assert len(error.faults) == 3
assert not {"torch", "mlflow"} & set(sys.modules), "ampexp.compose"
assert ampexp.amp.build_train_network and ampexp.boost and ampexp.networks and ampexp.data
"""
    subprocess.run([sys.executable, "-c", checks], check=True)
