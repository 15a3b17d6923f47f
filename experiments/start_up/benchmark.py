"""Seconds from the start of the process to the help text, and to the end of the first training step.

    python experiments/start_up/benchmark.py [--tries 5]

The first step is timed on a store that exists, by the line that the run prints after one step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ONE_STEP = [
    "level=O2", "boost_level=O1", "trainer.max_steps=1", "trainer.held_fraction=0", "trainer.progress=lines",
]  # fmt: skip


def seconds_until(words: list[str], sign: str, directory: str) -> float:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "ampexp", *words], cwd=directory, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        seen = next((time.perf_counter() - begin for line in process.stdout if sign in line), None)
        process.stdout.read()
    assert seen is not None, words
    assert process.returncode == 0, (words, process.returncode)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=5)
    tries = parser.parse_args().tries
    with tempfile.TemporaryDirectory() as directory:
        first = seconds_until(ONE_STEP, "epoch 1: step 1/1", directory)  # makes the store
        steps = [seconds_until(ONE_STEP, "epoch 1: step 1/1", directory) for _ in range(tries)]
        helps = [seconds_until(["--help"], "loss_scale_manager", directory) for _ in range(tries)]
    report = {
        "date": str(date.today()),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "tries": tries,
        "help_seconds_median": statistics.median(helps),
        "help_seconds_max": max(helps),
        "first_step_seconds_median": statistics.median(steps),
        "first_step_seconds_max": max(steps),
        "first_step_seconds_without_a_store": first,
    }
    text = json.dumps(report, indent=1)
    print(text)
    (Path(__file__).parent / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
