"""One job: from a config to objects, and from objects to a trained, measured and recorded run."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ampexp import collection, report
from ampexp.amp.build import assemble
from ampexp.amp.step import TrainNetwork
from ampexp.boost import make_boosts
from ampexp.config import AmpConfig
from ampexp.data import DataSet, as_dataset, hold_out, loader
from ampexp.messages import UserError
from ampexp.progress import open_progress
from ampexp.summary import Measurements, RunSummary
from ampexp.targets import make
from ampexp.tracking import Run, open_tracker
from ampexp.trainer import Clock, EpochRecord, MemoryMeter, evaluate, train

log = logging.getLogger(__name__)

FROM_DATA = "data"
"""The word in a network's arguments that stands for the number of that name in the data's facts."""


METRIC_METHODS = ("reset", "update", "compute")


@dataclass
class Job:
    """All that a training loop needs, made from a config."""

    train_network: TrainNetwork
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[..., Any] | None
    metric: Any
    data: DataSet
    train_batches: DataLoader
    held_batches: DataLoader | None
    test_batches: DataLoader
    augment_generator: torch.Generator
    device: torch.device
    total_steps: int
    num_untimed_steps: int
    patience: int
    clock: Clock = field(init=False)
    memory: MemoryMeter = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self.memory = MemoryMeter(self.device)

    def batches(self) -> Iterator[Any]:
        """Give the batches of one epoch, augmented from a generator of their own."""
        for batch in self.train_batches:
            if self.data.augment is not None:
                yield (self.data.augment(batch[0], self.augment_generator), *batch[1:])
            else:
                yield batch


def build(config: AmpConfig) -> Job:
    """Make the objects of a config; the only place that turns its words into objects.

    The same seed gives the same initial weights, batch order, augmentation and dropout masks at every level.

    Raises:
        UserError: something cannot be made as the config says.

    """
    device = _device(config.device.name)
    data = as_dataset(make("data", config.data.to_dict()))
    settings = config.trainer
    rest, held = hold_out(data.train, settings.held_fraction, data.stratified)
    _seed_everything(config.seed)
    network = make("network", _with_facts(config.network.to_dict(), data))
    _require(isinstance(network, nn.Module), "network", "a torch.nn.Module", config.network.target, network)
    network = network.to(device)
    loss_fn = _optional("loss", config.loss.to_dict())
    if config.loss.target is not None:
        _require(callable(loss_fn), "loss", "a function of (output, label)", config.loss.target, loss_fn)
    loss_fn = loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn
    parameters = [*network.parameters(), *(loss_fn.parameters() if isinstance(loss_fn, nn.Module) else [])]
    optimizer = make("optimizer", config.optimizer.to_dict(), parameters)
    _require(
        isinstance(optimizer, torch.optim.Optimizer), "optimizer", "a torch.optim.Optimizer",
        config.optimizer.target, optimizer,
    )  # fmt: skip
    order = torch.Generator().manual_seed(config.seed)
    batches = loader(rest, settings.batch_size, order, settings.num_workers)
    total_steps = min(
        settings.max_steps or 2**62, (settings.epochs or 2**62) * len(batches)
    )  # the config holds at least one of the two
    scheduler = make("scheduler", config.scheduler.to_dict(), optimizer, offered={"total_steps": total_steps})
    _require(
        callable(getattr(scheduler, "step", None)), "scheduler", "a learning-rate scheduler with a step() method",
        config.scheduler.target, scheduler,
    )  # fmt: skip
    metric = _optional("metric", config.metric.to_dict())
    if config.metric.target is not None:
        missing = [name for name in METRIC_METHODS if not callable(getattr(metric, name, None))]
        allowed = f"an object with {', '.join(METRIC_METHODS)}"
        _require(not missing, "metric", allowed, config.metric.target, metric, f" without {', '.join(missing)}")
    arguments = config.amp_arguments()
    boosts = make_boosts(config.boost_level, grad_freeze={"total_steps": total_steps, "seed": config.seed})
    try:
        train_network = assemble(
            network, optimizer, loss_fn, arguments.pop("level"), boosts,
            scheduler=scheduler, clip_norm=settings.clip_norm, **arguments,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    _seed_everything(config.seed + 1)  # from here on the stream belongs to dropout
    evaluation = settings.eval_batch_size
    return Job(
        train_network=train_network,
        optimizer=optimizer,
        loss_fn=loss_fn,
        metric=metric,
        data=data,
        train_batches=batches,
        held_batches=None if held is None else loader(held, evaluation),
        test_batches=loader(data.test, evaluation),
        augment_generator=torch.Generator().manual_seed(config.seed),
        device=device,
        total_steps=total_steps,
        num_untimed_steps=max(settings.warmup_steps, 1),  # at least one is measured for memory
        patience=settings.patience,
    )


def run(config: AmpConfig) -> RunSummary:
    """Train, measure and record one job.

    Returns:
        Its summary: what ran, how fast, how accurate, where it is recorded.

    Raises:
        UserError: something of the user's cannot be made or used.

    """
    with collection.paused(), _threads(config.device.threads):
        job = build(config)
        settings = config.tracker
        run_name = settings.run_name or f"{config.level} boost {config.boost_level}"
        tracker = open_tracker(settings.name, settings.uri, settings.experiment, run_name, Path.cwd())
        log.info("tracking: %s", tracker.where)
        record = job.train_network.record
        tags = {
            **{f"resolved.{key}": value for key, value in record.items()},
            **{f"resolved.data.{key}": str(value) for key, value in job.data.facts.items()},
            "data_digest": job.data.digest or "not known: objects of the user's own",
            "threads": str(torch.get_num_threads()),
            "device": str(job.device),
        }
        with tracker.run(config.to_dict(), config.to_yaml(), tags) as tracked:
            summary = _trained(job, config, tracked)
            table = report.table(summary)
            tracked.log_summary(summary.metrics())
            tracked.log_text(table, "summary.txt")
            if settings.log_model:
                tracked.log_model(job.train_network.network.network, _example(job))
    print(table)
    return summary


def _trained(job: Job, config: AmpConfig, tracked: Run) -> RunSummary:
    """Go through the training and send what happened after each epoch, never between steps."""
    collection.resume()
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    measurements = Measurements(job.clock)
    held: dict[str, float] = {}
    num_epochs = 0
    with open_progress(config.trainer.progress, job.total_steps) as progress:
        try:
            for event in train(job):
                if isinstance(event, EpochRecord):
                    _send(measurements, tracked, config.trainer.log_every_steps)
                    held, num_epochs = event.held, event.epoch + 1
                    tracked.log_metrics({f"held_{key}": value for key, value in held.items()}, event.step - 1)
                    tracked.flush()
                    progress.epoch(event)
                else:
                    measurements.add(event)
                    progress.step(event)
        except BaseException:
            _send(measurements, tracked, config.trainer.log_every_steps)  # what happened before it ended
            raise
    return measurements.summary(
        job.train_network.record,
        evaluate(job, job.test_batches),
        held,
        num_epochs=num_epochs,
        final_loss_scale=job.train_network.loss_scale.value,
        peak_tensor_bytes=job.memory.peak_bytes(),
        where=tracked.where,
        run_id=tracked.run_id,
    )


def _send(measurements: Measurements, tracked: Run, every: int) -> None:
    for step, values in measurements.close_window():
        if step % every == 0:
            tracked.log_metrics(values, step)


def _example(job: Job) -> Any:
    """Give two inputs of the test set, for the recorded model's signature."""
    batch = next(iter(loader(job.data.test, 2)))
    return batch[0] if isinstance(batch, tuple | list) else batch


def _with_facts(section: dict[str, Any], data: DataSet) -> dict[str, Any]:
    """Replace each argument that says `data` by the number of its name that the data know."""
    for key, value in section.items():
        if value == FROM_DATA:
            if key not in data.facts:
                known = ", ".join(data.facts) or "none"
                raise UserError(
                    f"network.{key} must be a number, or a fact that the data know ({known}); got 'data'"
                    f" with data {data.name}"
                )
            section[key] = data.facts[key]
    return section


def _optional(where: str, section: dict[str, Any]) -> Any:
    return None if section["_target_"] is None else make(where, section)


def _require(holds: bool, where: str, allowed: str, target: str, made: object, lack: str = "") -> None:
    """Refuse what a target made unless the condition holds."""
    if not holds:
        raise UserError(f"{where} must be {allowed}; {target} made {type(made).__name__}{lack}")


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("device must be one that this machine has (cpu); got 'cuda', and PyTorch sees no CUDA device")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of threads for one job and give the process its own back."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
