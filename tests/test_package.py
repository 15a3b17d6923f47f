from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_package_is_listed() -> None:
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ampexp").rglob("__init__.py")}
    there |= {".".join(path.relative_to(ROOT).parts) for path in (ROOT / "ampexp").rglob("*") if _holds_modules(path)}
    groups = {f"ampexp.conf.{path.name}" for path in (ROOT / "conf").iterdir() if any(path.glob("*.yaml"))}
    assert set(SETUP["tool"]["setuptools"]["packages"]) == there | {"ampexp.conf"} | groups


def _holds_modules(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


def test_constraints_pin_what_is_needed() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    needed = [*SETUP["project"]["dependencies"], *SETUP["project"]["optional-dependencies"]["dev"]]
    assert {name.partition(">")[0].lower() for name in needed} <= pinned


def test_the_makefile_explains_its_targets() -> None:
    shown = subprocess.run(["make", "-C", str(ROOT), "-s", "help"], capture_output=True, text=True, check=True).stdout
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = next(line for line in lines if line.startswith(".PHONY")).split()[1:]
    assert len(targets) <= 10
    explained = [line.split()[1].rstrip(":") for line in shown.splitlines() if line.startswith("make ")]
    assert sorted(explained) == sorted(targets)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, from it a wheel, and install the wheel into a directory."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("ampexp", "conf", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    python(folder, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source))
    (wheel,) = (folder / "dist").glob("*.whl")
    python(folder, "-m", "pip", "install", "--no-deps", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def python(directory: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_with_a_network_of_ones_own(installed: Path, tmp_path: Path) -> None:
    options = tmp_path / "options" / "network"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("# My own network.\n_target_: mine.Net\nwidth: 8\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    site = {"PYTHONPATH": str(installed)}
    assert python(empty, "-c", "import ampexp; print(ampexp.__file__)", **site).startswith(str(installed))
    assert "My own network." in python(empty, "-m", "ampexp", "--help", "--config-dir", "../options", **site)
    words = ("--config-dir", "../options", "network=mine", "network.width=9", "level=O2", "--cfg", "job", "--resolve")
    shown = yaml.safe_load(python(empty, "-m", "ampexp", *words, **site))
    assert shown["network"] == {"_target_": "mine.Net", "width": 9}
    assert shown["level"] == "O2"
    conf = installed / "ampexp" / "conf"
    there = {path.relative_to(conf) for path in conf.rglob("*.yaml")}
    assert there == {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    assert list(empty.iterdir()) == []


def blocks(language: str) -> list[str]:
    """Give the README's code blocks of a language."""
    text = (ROOT / "README.md").read_text("utf-8")
    return [part.partition("```")[0] for part in text.split(f"```{language}\n")[1:]]


@pytest.mark.slow
def test_the_wheel_trains_what_the_readme_brings(installed: Path, tmp_path: Path) -> None:
    code, library = blocks("python")
    network, data = blocks("yaml")
    (tmp_path / "mine.py").write_text(code)
    for group, text in (("network", network), ("data", data)):
        (tmp_path / "options" / group).mkdir(parents=True)
        (tmp_path / "options" / group / "mine.yaml").write_text(text)
    (command,) = (line for block in blocks("") for line in block.splitlines() if "network=mine" in line)
    shown = python(tmp_path, *command.split()[1:], PYTHONPATH=str(installed), MLFLOW_TRACKING_URI="")
    assert float(shown.partition("test accuracy")[2].split("%")[0]) > 80
    assert (tmp_path / "mlflow.db").exists()
    printed = python(tmp_path, "-c", library, PYTHONPATH=str(installed), MLFLOW_TRACKING_URI="")
    assert "torch.float32" in printed
