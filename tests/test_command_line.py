from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import ampexp
from ampexp.__main__ import COMMANDS, main
from ampexp.config import AmpConfig
from ampexp.option_files import groups, options
from tests.conftest import CommandLine


def run(*words: str) -> int:
    """Run the command line in this process; give the exit status."""
    try:
        return main(words)
    except SystemExit as ending:
        return int(ending.code or 0)


@pytest.fixture(autouse=True)
def _launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch from an empty directory, and take Hydra's log handlers down: they hold this test's streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    loggers = [logging.getLogger(name) for name in (None, "hydra")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, state in zip(loggers, before, strict=True):
        for handler in logger.handlers:
            if handler not in state[0]:
                handler.close()
        logger.handlers, logger.level, logger.propagate = state


def test_help_lists_everything_and_imports_little(command_line: CommandLine, tmp_path: Path) -> None:
    own = tmp_path / "own" / "network"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# A network of my own.\n_target_: mine.Net\n")
    done = command_line("--help", "--config-dir", str(own.parent))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for command in COMMANDS:
        assert any(line.startswith(f"  {command} ") for line in lines)
    for group in groups():
        begins = next(index for index, line in enumerate(lines) if line.startswith(f"{group}: "))
        for option in options(group):
            assert any(line.split()[:1] == [option] and len(line.split()) > 2 for line in lines[begins:])
    assert any(line.split(maxsplit=1) == ["mine", "A network of my own."] for line in lines)
    for key in ("seed", "keep_batchnorm_fp32"):
        assert any(line.startswith(f"  {key}=") for line in lines)


def test_help_imports_neither_torch_nor_hydra() -> None:
    checks = "import sys; from ampexp.__main__ import main; main(['-h'])\n"
    checks += "assert not {'torch', 'mlflow', 'hydra', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", checks], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("first", [[], ["train"]])
def test_cfg_job_shows_what_compose_gives(first: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*first, "level=O2", "--cfg", "job", "--resolve", "boost_level=O1") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert AmpConfig.parse(shown) == ampexp.compose("level=O2", "boost_level=O1")


def test_cfg_job_imports_no_torch() -> None:
    checks = "import sys; from ampexp.__main__ import main\n"
    checks += "assert main(['--cfg', 'job', 'level=O2']) == 0\n"
    checks += "assert not {'torch', 'mlflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", checks], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "the command must be one of train, ui; got 'trian' (did you mean train?)"),
        ([""], "the command must be one of train, ui; got ''"),
        (["level=O2", "ui"], "'ui' is no override (key=value): missing EQUAL at '<EOF>'"),
        (["level=o2"], "level must be one of O0, O1, O2, O3, auto; got 'o2' (did you mean O2?)"),
        (["--cfg", "job", "level=[O1,O2]"], "got ['O1', 'O2'] (for one job each: -m level=O1,O2)"),
        (["-m", "level=[O1,O2],O3"], "got ['O1', 'O2'] (for one job each: -m level=O1,O2)"),
        (["-m", "level=O1,O9"], "level must be one of O0, O1, O2, O3, auto; got 'O9'"),
        (["level=O1,O2"], "'level=O1,O2' is a sweep: add -m"),
        (["loss_scale_manager=null"], "got null (write none)"),
        (["trainer.epochs=0"], "trainer.epochs must be an integer of at least 1 or null; got 0"),
        (["optimizer.lr=off"], "optimizer.lr must be a finite number; got 'off'"),
        (["--resolve"], "--resolve"),
        (["--config-dir", "nowhere"], "nowhere"),
        (["ui", "prot=3"], "what follows ui must be one of host=, port=, tracker.uri=; got 'prot=3'"),
        (["ui", "port=0"], "port must be an integer of at least 1 and below 65536; got '0'"),
        (["ui", "tracker=none"], "tracker=none records nothing"),
        (["ui", "tracker.url=x"], "tracker.url is no known key (did you mean uri?)"),
    ],
)
def test_mistakes_end_with_2_and_one_line(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    shown = capfd.readouterr().err.splitlines()
    assert sum(said in line for line in shown) == 1
    assert len(shown) == 1
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_all_mistakes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("level=O7", "trainer.epoch=3", "seed=x", "boost_level=[O1]", "trainer.patience=-1") == 2
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_a_sweep_says_which_job_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "seed=-1,-2") == 2
    shown = capsys.readouterr().err
    assert "job 0 (seed=-1): seed must be" in shown
    assert "job 1 (seed=-2): seed must be" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("sweep", [[], ["-m", "seed=0,1"]])
def test_a_failure_in_training_ends_with_1_and_says_where(
    sweep: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, images):\n"
        "        raise ArithmeticError('my own mistake')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    (tmp_path / "network").mkdir()
    (tmp_path / "network" / "failing.yaml").write_text("_target_: failing.Net\nin_features: 1\nout_features: 1\n")
    words = ["--config-dir", str(tmp_path), "network=failing", "data=digits", "tracker=none", *sweep]
    assert run(*words) == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("ArithmeticError: my own mistake") == (2 if sweep else 1)
    assert f"  at {tmp_path / 'failing.py'}:4 in forward" in shown
    assert "HYDRA_FULL_ERROR=1" in shown


def test_an_unknown_option_of_the_command_line_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--levle", "O2") == 2
    assert "--levle" in capsys.readouterr().err


def test_a_mistake_in_a_process_of_its_own(command_line: CommandLine) -> None:
    done = command_line("level=O2", "trainer.epochs=x", "seed=off")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2
    full = command_line("trainer.epochs=x", HYDRA_FULL_ERROR="1")
    assert full.returncode == 2
    assert "Traceback" in full.stderr


@pytest.mark.parametrize("words", [["--help"], ["--cfg", "all"]])
def test_a_reader_that_goes_away_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "ampexp", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


TRAINING = ("data=digits", "network=mlp", "tracker=none", "trainer.epochs=null", "trainer.max_steps=1", "device=cpu")


@pytest.mark.parametrize("words", [("--help",), ("--cfg", "all"), TRAINING], ids=["help", "cfg", "train"])
@pytest.mark.parametrize("full", [False, True], ids=["closed", "full"])
def test_a_stdout_that_takes_nothing_is_one_line(words: tuple[str, ...], full: bool, tmp_path: Path) -> None:
    """With a buffer and without one, where the very print fails."""
    if full and not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    unbuffered = "1" if words == TRAINING else ""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {">/dev/full" if full else ">&-"}', "sh", sys.executable, "-m", "ampexp", *words,
         *(["trainer.progress=none"] if words == TRAINING else [])],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    said = "stdout cannot be written: No space left on device" if full else "stdout is closed"
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stderr_is_no_failure(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "ampexp", *TRAINING]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "test accuracy" in done.stdout


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("in_python", "        import json\n        return json.loads('')\n"),
        ("in_torch", "        return nn.functional.cosine_similarity(images, 3)\n"),
        ("in_ampexp", "        import ampexp\n        return ampexp.amp.DynamicLossScaleManager(-1)\n"),
    ],
)
def test_the_place_of_a_failure_is_in_the_users_own_code(
    name: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = f"from torch import nn\nclass Net(nn.Linear):\n    def forward(self, images):\n{body}"
    (tmp_path / f"{name}.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(*TRAINING, f"network._target_={name}.Net", "~network.widths", "~network.num_classes",
               "+network.out_features=1") == 1  # fmt: skip
    where = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("  at "))
    assert where == f"  at {tmp_path / name}.py:{written.count(chr(10))} in forward"


def test_a_failure_without_code_of_the_users_names_the_last_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TRAINING, "network.num_classes=2") == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert not any(f"/ampexp/{room}" in shown for room in ("memory", "job", "trainer"))
    assert "  at " in shown


def test_hydra_keeps_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--info", "searchpath") == 0
    assert "pkg://ampexp.conf" in capsys.readouterr().out
    assert run("--cfg", "hydra", "hydra.job.name=mine") == 0
    assert "name: mine" in capsys.readouterr().out
    assert run("-sc", "install=bash") == 0
