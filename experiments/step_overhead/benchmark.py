"""Our step against a hand-written PyTorch loop: LeNet-5, batch 64, level O0, interleaved in one process.

    python experiments/step_overhead/benchmark.py [--blocks 8] [--rounds 60] [--device cpu] [--results FILE]

Each block builds all candidates anew (memory layout alone moves a step); in each round every candidate takes one step,
in random order. Reported: the ratio of medians to the hand-written loop over all rounds, and its spread over blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn

from ampexp.amp import build_train_network
from ampexp.networks import LeNet5
from ampexp.summary import Measurements
from ampexp.tracking import open_tracker
from ampexp.trainer import Clock, StepRecord

DEVICE = torch.device("cpu")
Step = Callable[[torch.Tensor, torch.Tensor], None]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    network = LeNet5(num_classes=10, in_channels=1, image_size=32).to(DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    return network, optimizer, nn.CrossEntropyLoss()


def by_hand() -> Step:
    network, optimizer, loss_fn = parts()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(network(x), y).backward()
        optimizer.step()

    return step


def ours() -> Step:
    train_network = build_train_network(*parts(), level="O0")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train_network(x, y)

    return step


def ours_logged(measurements: Measurements) -> Step:
    """Our step with what the training loop adds to it when every step is logged: a record, read at the window's end."""
    train_network = build_train_network(*parts(), level="O0")
    steps = iter(range(10**9))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        begin = measurements.clock.mark()
        output = train_network(x, y)
        end = measurements.clock.mark()
        measurements.add(
            StepRecord(next(steps), 0, len(x), output, False, 0.01, train_network.grad_norm, 0.0, (begin, end), True)
        )

    return step


def send(measurements: Measurements, run) -> float:
    """Send what the window holds, as the training loop does after an epoch; give the seconds."""
    begin = time.perf_counter()
    for step, values in measurements.close_window():
        run.log_metrics(values, step)
    run.flush()
    return time.perf_counter() - begin


def finished() -> float:
    """Give the time when the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(threads: int, blocks: int, rounds: int, run) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    x, y = torch.randn(64, 1, 32, 32, device=DEVICE), torch.randint(0, 10, (64,), device=DEVICE)
    measurements = Measurements(Clock(DEVICE))
    makers = {"by hand": by_hand, "ours": ours, "ours, every step logged": lambda: ours_logged(measurements)}
    seconds: dict[str, list[list[float]]] = {name: [] for name in makers}
    flush_seconds = 0.0
    for _ in range(blocks):
        steps = {name: make() for name, make in makers.items()}
        times: dict[str, list[float]] = {name: [] for name in makers}
        for count in range(rounds + 10):
            for name in random.sample(list(steps), len(steps)):
                begin = finished()
                steps[name](x, y)
                if count >= 10:
                    times[name].append(finished() - begin)
        flush_seconds += send(measurements, run)
        for name, values in times.items():
            seconds[name].append(values)
    result = {}
    for name, per_block in seconds.items():
        ratios = [
            statistics.median(mine) / statistics.median(base)
            for mine, base in zip(per_block, seconds["by hand"], strict=True)
        ]
        everything = [value for values in per_block for value in values]
        base = [value for values in seconds["by hand"] for value in values]
        result[name] = {
            "median_step_seconds": statistics.median(everything),
            "ratio_of_medians": statistics.median(everything) / statistics.median(base),
            "ratio_lowest_block": min(ratios),
            "ratio_highest_block": max(ratios),
        }
    result["sending, outside the steps"] = {"seconds_per_logged_step": flush_seconds / (blocks * (rounds + 10))}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.json")
    args = parser.parse_args()
    global DEVICE
    DEVICE = torch.device(args.device)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tracker = open_tracker("mlflow", None, "step_overhead", None, Path(folder))
        with tracker.run({}, "", {}) as run:
            threads = {str(n): measure(n, args.blocks, args.rounds, run) for n in (1, 2)}
    machine = {"processor": processor(), "cores": os.cpu_count(), "device": args.device, "torch": torch.__version__}
    report = {"date": str(date.today()), "machine": machine, "blocks": args.blocks, "rounds": args.rounds,
              "threads": threads}  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    args.results.write_text(text + "\n")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
