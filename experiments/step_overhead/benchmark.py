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
from ampexp.tracking import open_tracker

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


def ours_logged(run) -> Step:
    """Our step with what logging of every step adds to it: the value read and put into the buffer."""
    train_network = build_train_network(*parts(), level="O0")
    steps = iter(range(10**9))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        output = train_network(x, y)
        values = {
            "train_loss": float(output.loss), "loss_scale": float(output.loss_scale),
            "overflow": float(output.overflow), "learning_rate": 0.01, "step_seconds": 0.01,
        }  # fmt: skip
        run.log_metrics(values, next(steps))

    return step


def finished() -> float:
    """Give the time when the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(threads: int, blocks: int, rounds: int, run) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    x, y = torch.randn(64, 1, 32, 32, device=DEVICE), torch.randint(0, 10, (64,), device=DEVICE)
    makers = {"by hand": by_hand, "ours": ours, "ours, every step logged": lambda: ours_logged(run)}
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
        begin = time.perf_counter()
        run.flush()
        flush_seconds += time.perf_counter() - begin
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
    result["flush outside the steps"] = {"seconds_per_logged_step": flush_seconds / (blocks * (rounds + 10))}
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
