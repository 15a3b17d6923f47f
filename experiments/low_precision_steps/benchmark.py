"""A training step in float16 and bfloat16 against float32, and against PyTorch's own low precision, on this CPU.

    python experiments/low_precision_steps/benchmark.py [--rounds 12] [--blocks 3] [--threads 1 2] [--results FILE]

Batch 64 images or 32 x 128 tokens. In a block all candidates are built anew (memory layout alone moves a step); in each
round every candidate takes one step, in random order; a figure is the ratio of medians over all rounds. PyTorch's own
way (autocast, and a network converted by `.to(dtype)`, both with the same optimizer by hand) takes part in one round
of the first block: it is slow. The collector and the allocator are set as `python -m ampexp` sets them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampexp
from ampexp import collection, job
from ampexp.amp import auto_mixed_precision, build_train_network
from ampexp.networks import LeNet5, ResNet20, Transformer

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LEVELS = ("O1", "O2", "O3")
Step = Callable[[], None]


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def image_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def parts(name: str) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if name == "transformer":
        tokens = torch.randint(256, (32, 129))
        return Transformer(256, dropout=0.0), token_loss, (tokens[:, :-1], tokens[:, 1:])
    network, channels = (ResNet20(), 3) if name == "resnet20" else (LeNet5(), 1)
    return network, image_loss, (torch.randn(64, channels, 32, 32), torch.randint(10, (64,)))


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


def ours(name: str, level: str, dtype: str) -> Step:
    network, loss_fn, batch = parts(name)
    optimizer = optimizer_of(network)
    if level == "O0" or dtype == "float16":
        built = build_train_network(network, optimizer, loss_fn, level, cpu_loss_scaling=True)
    elif level == "O1":  # cast_model_type would convert the whole network
        low = auto_mixed_precision(network, "O1", DTYPES[dtype])
        built = build_train_network(low, optimizer, loss_fn)
    else:
        built = build_train_network(
            network, optimizer, loss_fn, level, cast_model_type=DTYPES[dtype], cpu_loss_scaling=True
        )
    return lambda: built(*batch)


def autocast(name: str, dtype: str) -> Step:
    network, loss_fn, (inputs, labels) = parts(name)
    optimizer = optimizer_of(network)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPES[dtype]):
            output = network(inputs)
        loss_fn(output, labels).backward()
        optimizer.step()

    return step


def converted(name: str, dtype: str) -> Step:
    network, loss_fn, (inputs, labels) = parts(name)
    network = network.to(DTYPES[dtype])
    inputs = inputs.to(DTYPES[dtype]) if inputs.is_floating_point() else inputs
    optimizer = optimizer_of(network)

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(network(inputs), labels).backward()
        optimizer.step()

    return step


def main_job(level: str, dtype: str) -> Step:
    """The default job with its own data and batches."""
    words = ["device=cpu", "loss_scale_manager=none", f"level={level}"]
    if dtype == "bfloat16" and level in ("O2", "O3"):
        words.append("cast_model_type=bfloat16")
    built = job.build(ampexp.compose(*words))
    batches = itertools.cycle(list(built.batches())[:-1])
    return lambda: built.train_network(*next(batches))


def candidates(name: str) -> dict[str, Callable[[], Step]]:
    """Give what is compared on a network, each to be built anew; `PyTorch` leads the slow ones."""
    make = main_job if name == "main job" else lambda level, dtype: ours(name, level, dtype)
    chosen: dict[str, Callable[[], Step]] = {"O0": lambda: make("O0", "float32")}
    for dtype in DTYPES:
        for level in LEVELS:
            if (name, level, dtype) != ("main job", "O1", "bfloat16"):  # O1 of a config is float16
                chosen[f"{level} {dtype}"] = lambda level=level, dtype=dtype: make(level, dtype)
        if name != "main job":
            chosen[f"PyTorch autocast {dtype}"] = lambda dtype=dtype: autocast(name, dtype)
            chosen[f"PyTorch converted {dtype}"] = lambda dtype=dtype: converted(name, dtype)
    return chosen


def measure(name: str, threads: int, blocks: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {}
    for block in range(blocks):
        steps = {key: build() for key, build in candidates(name).items()}
        for number in range(rounds + 2):
            for key in random.sample(list(steps), len(steps)):
                if key.startswith("PyTorch") and (block, number) != (0, 2):
                    continue
                begin = time.perf_counter()
                steps[key]()
                if number >= 2:
                    seconds.setdefault(key, []).append(time.perf_counter() - begin)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    rows = {key: {"milliseconds": round(1e3 * value, 2), "to_float32": round(value / medians["O0"], 3)}
            for key, value in medians.items()}  # fmt: skip
    for key, row in rows.items():
        level, _, dtype = key.partition(" ")
        if level in LEVELS and f"PyTorch autocast {dtype}" in medians:
            for way in ("autocast", "converted"):
                row[f"faster_than_{way}"] = round(medians[f"PyTorch {way} {dtype}"] / medians[key], 2)
    for key, row in rows.items():
        print(threads, name, f"{key:28s}", row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ["resnet20", "lenet5", "transformer", "main job"]
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.json")
    args = parser.parse_args()
    random.seed(0)
    gc.collect()
    gc.freeze()
    collection.keep_freed_memory()
    table = {}
    for name in args.only:
        rounds = args.rounds * 5 if name in ("lenet5", "main job") else args.rounds
        for threads in args.threads:
            table[f"{name}, {threads} threads"] = measure(name, threads, args.blocks, rounds)
    machine = {"processor": torch.cpu.get_capabilities()["cpu_name"], "cores": os.cpu_count(),
               "kernels": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}  # fmt: skip
    report = {"date": str(date.today()), "machine": machine, "blocks": args.blocks, "rounds": args.rounds,
              "steps": table}  # fmt: skip
    args.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
