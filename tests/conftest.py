from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests share their processors
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

settings.register_profile("ampexp", deadline=None, derandomize=True)
settings.load_profile("ampexp")

CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    """Run `python -m ampexp` in a process and a directory of its own."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        directory = tmp_path / "launch"
        directory.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "ampexp", *words],
            cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run
