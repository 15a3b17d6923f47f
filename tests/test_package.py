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
    assert set(SETUP["tool"]["setuptools"]["packages"]) == there | {"ampexp.conf"}


def _holds_modules(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


def test_constraints_pin_what_is_needed() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    needed = [*SETUP["project"]["dependencies"], *SETUP["project"]["optional-dependencies"]["dev"]]
    assert {name.partition(">")[0].lower() for name in needed} <= pinned


def test_the_makefile_explains_its_targets() -> None:
    shown = subprocess.run(["make", "-C", str(ROOT), "-s", "help"], capture_output=True, text=True, check=True).stdout
    targets = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY")).split()[1:]
    assert len(targets) <= 10
    assert sorted(line.split()[1].rstrip(":") for line in shown.splitlines() if line.startswith("make ")) == sorted(
        targets
    )


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
    names = {path.relative_to(installed / "ampexp" / "conf") for path in (installed / "ampexp" / "conf").rglob("*.yaml")}
    assert names == {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    assert list(empty.iterdir()) == []
