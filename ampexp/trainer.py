"""The training loop: yields what happened, step by step and epoch by epoch, and knows no tracker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampexp.amp.step import StepOutput, loss_of
from ampexp.faults import spell
from ampexp.memory import TensorMemory, tensors_of
from ampexp.messages import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.data import DataLoader

    from ampexp.job import Job


@dataclass(frozen=True)
class StepRecord:
    """One step: its number from 0, real sample count, output, learning rate, and clock marks around it.

    `timed`: it counts for the rate; the first steps of a run warm up and are measured for memory instead.
    """

    step: int
    epoch: int
    num_samples: int
    output: StepOutput
    skipped: bool
    learning_rate: float
    grad_norm: Tensor | None
    data_seconds: float
    marks: tuple[Any, Any]
    timed: bool


@dataclass(frozen=True)
class EpochRecord:
    """The end of an epoch: what the held part of the training set says (empty without one)."""

    epoch: int
    step: int
    held: dict[str, float]


class Clock:
    """Marks in time and the seconds between them; on CUDA events, so that no step waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Mark this moment in the device's order of work."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronise(self) -> None:
        """Wait until the marks are reached; called where a window of steps ends."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, marks: tuple[Any, Any]) -> float:
        """Give the seconds between two marks."""
        begin, end = marks
        return begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin


def train(job: Job) -> Iterator[StepRecord | EpochRecord]:
    """Train a job and yield a record after each step and each epoch.

    Data waiting, evaluation and whatever the caller does with a record lie outside the marks of a step.
    """
    step, epoch, best, since_best = 0, 0, float("inf"), 0
    train_network = job.train_network
    while step < job.total_steps:
        waited = time.perf_counter()
        for batch in job.batches():
            batch = moved(batch, job.device)
            data_seconds = time.perf_counter() - waited
            timed = step >= job.num_untimed_steps
            learning_rate = job.optimizer.param_groups[0]["lr"]
            num_skipped = train_network.num_skipped_steps
            with nullcontext() if timed else job.memory.measured(train_network, batch):
                begin = job.clock.mark()
                output = train_network(*batch)
                end = job.clock.mark()
            yield StepRecord(
                step, epoch, num_samples(batch), output, train_network.num_skipped_steps > num_skipped,
                learning_rate, train_network.grad_norm, data_seconds, (begin, end), timed,
            )  # fmt: skip
            step += 1
            if step == job.total_steps:
                break
            waited = time.perf_counter()
        job.clock.synchronise()
        held = evaluate(job, job.held_batches) if job.held_batches is not None else {}
        yield EpochRecord(epoch, step, held)
        epoch += 1
        since_best = 0 if held.get("loss", best) < best else since_best + 1
        best = min(best, held.get("loss", best))
        if 0 < job.patience <= since_best:
            return


@torch.no_grad()
def evaluate(job: Job, batches: DataLoader) -> dict[str, float]:
    """Give the sample-weighted mean loss and the metric of a part of the data, the network in eval mode."""
    network, metric = job.train_network.network, job.metric
    if metric is not None:
        metric.reset()
    total, count = 0.0, 0
    with evaluating(network):
        for batch in batches:
            batch = moved(batch, job.device)
            output = network(*batch) if job.loss_fn is None else network(*batch[:-1])
            loss = output if job.loss_fn is None else job.loss_fn(output, batch[-1])
            total += loss_of(loss).double().item() * num_samples(batch)
            count += num_samples(batch)
            if metric is not None:
                metric.update(output, batch[-1])
    return {"loss": total / count, **({} if metric is None else _computed(metric))}


def _computed(metric: Any) -> dict[str, float]:
    """Give what a metric measured, each number by its name; a single number goes by the name of the metric's class."""
    name = type(metric).__name__
    values = metric.compute()
    if not isinstance(values, Mapping):
        values = {name.lower(): values}
    return {str(key): _number(f"metric: {name}.compute()", value) for key, value in values.items()}


def _number(where: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes) or (isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex())):
            raise TypeError  # float() reads a text, and of a tensor it raises what a failing device raises too
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where} must give a number or a dict of numbers; got {spell(value)}") from None


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into eval mode and give each of its modules its own flag back."""
    flags = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


class MemoryMeter:
    """The largest memory that a step's tensors took: counted by storage on the CPU, by the allocator on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._counted = 0

    def measured(self, train_network: Any, batch: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """Measure one step."""
        return nullcontext() if self.device.type == "cuda" else self._counting(train_network, batch)

    @contextmanager
    def _counting(self, train_network: Any, batch: tuple[Any, ...]) -> Iterator[None]:
        with TensorMemory() as memory:
            parameters = list(train_network.parameters())
            gradients = [parameter.grad for parameter in parameters]
            state = dict(train_network.optimizer.state)
            memory.hold(tensors_of(parameters, list(train_network.buffers()), gradients, state, batch))
            del gradients, state
            yield
        self._counted = max(self._counted, memory.peak_bytes)

    def peak_bytes(self) -> int:
        """Give the peak so far, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._counted


def moved(value: Any, device: torch.device) -> Any:
    """Put the tensors of a batch on a device; a batch that is no tuple or list becomes a tuple of one."""
    if not isinstance(value, tuple | list):
        value = (value,)
    if device.type == "cpu":
        return tuple(value)
    return tuple(torch.utils._pytree.tree_map_only(Tensor, lambda item: item.to(device), value))


def num_samples(batch: Iterable[Any]) -> int:
    """Give the number of samples: the first axis of the first tensor that has one."""
    return next((len(leaf) for leaf in tensors_of(*batch) if leaf.dim() > 0), 1)
