"""The test accuracy of the default job at each level, over paired seeds.

    python experiments/low_precision_accuracy/run.py [--seeds 15] [--levels O0 O2 O3] [--results FILE]

A pair has the same initial weights, batch order and data; what differs is the level. Written down: each accuracy, the
spread over seeds at O0 (standard deviation), and the paired differences to O0 with their standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ampexp


def accuracy(level: str, seed: int) -> float:
    summary = ampexp.run(
        ampexp.compose(f"level={level}", f"seed={seed}", "device=cpu", "tracker=none", "trainer.progress=none")
    )
    return summary.test["accuracy"]


def differences(values: list[float], base: list[float]) -> dict[str, Any]:
    paired = [mine - other for mine, other in zip(values, base, strict=True)]
    return {
        "mean": statistics.mean(paired),
        "standard_error": statistics.stdev(paired) / len(paired) ** 0.5,
        "within_spread_of_O0": abs(statistics.mean(paired)) <= statistics.stdev(base),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--levels", nargs="+", default=["O0", "O2", "O3"])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.json")
    args = parser.parse_args()
    table: dict[str, list[float]] = {level: [] for level in args.levels}
    for seed in range(args.seeds):
        for level in args.levels:
            table[level].append(accuracy(level, seed))
    base = table["O0"]
    report = {
        "date": str(date.today()),
        "machine": {"processor": torch.cpu.get_capabilities()["cpu_name"], "cores": os.cpu_count(),
                    "torch": torch.__version__},
        "seeds": args.seeds,
        "accuracy": table,
        "mean": {level: statistics.mean(values) for level, values in table.items()},
        "spread_of_O0": statistics.stdev(base),
        "to_O0": {level: differences(values, base) for level, values in table.items() if level != "O0"},
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    args.results.write_text(text + "\n")


if __name__ == "__main__":
    main()
