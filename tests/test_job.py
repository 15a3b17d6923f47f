"""The main job: what ran is what was asked, same seed same run, numbers mean what their names say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampexp
from ampexp.amp.step import TrainNetwork
from ampexp.job import Job, build, run
from ampexp.messages import UserError
from ampexp.summary import RunSummary
from ampexp.trainer import EpochRecord, StepRecord, evaluate, evaluating, train

SMALL = ("tracker=none", "data=digits", "network=mlp", "trainer.progress=none", "trainer.batch_size=50")
SHORT = (*SMALL, "trainer.epochs=null", "trainer.max_steps=6", "trainer.warmup_steps=2")


def trained(*overrides: str) -> RunSummary:
    return run(ampexp.compose(*overrides))


def weights(job: Job) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in job.train_network.network.state_dict().items()}


def steps(job: Job) -> list[StepRecord]:
    return [event for event in train(job) if isinstance(event, StepRecord)]


@pytest.mark.parametrize("boost_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_every_level_runs_and_records_what_was_resolved(level: str, boost_level: str) -> None:
    record = trained(*SHORT, f"level={level}", f"boost_level={boost_level}").record
    assert record["requested_level"] == level
    assert record["level"] == ("O0" if level == "auto" else level)
    assert record["boost_level"] == boost_level
    assert ("grad_freeze" in record["boosts"]) == (boost_level != "O0")
    assert ("boost_note" in record) == (boost_level == "O2")
    assert record["loss_scale_manager"] == ("dynamic 1.67772e+07" if level == "O2" else "none")


def test_the_main_job_is_accurate(capsys: pytest.CaptureFixture[str]) -> None:
    summary = trained("tracker=none", "level=O2", "boost_level=O1", "trainer.epochs=5", "trainer.progress=none")
    assert summary.test["accuracy"] > 0.9
    assert summary.num_skipped_steps > 0  # 2**24 is too large for a first scale: the level scales really
    assert summary.final_loss_scale < 2**24
    shown = capsys.readouterr().out
    for word in ("O2", "float16", "grad_freeze", "samples per second", "test accuracy", "recorded at"):
        assert word in shown


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_same_seed_is_the_same_run(level: str) -> None:
    config = ampexp.compose(*SHORT, f"level={level}", "boost_level=O1")
    runs = []
    for _ in range(2):
        job = build(config)
        losses = [record.output.loss for record in steps(job)]
        runs.append((losses, weights(job)))
    assert torch.equal(torch.stack(runs[0][0]), torch.stack(runs[1][0]))
    assert all(torch.equal(value, runs[1][1][key]) for key, value in runs[0][1].items())


class Dropper(nn.Module):
    """Records what it sees: the batch and the mask of its dropout."""

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, 32)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        kept = self.drop(torch.ones_like(x))
        self.seen.append((x.shape, kept.detach() != 0))
        return self.head(x * kept)


def test_seed_fixes_weights_order_augmentation_and_masks_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in SHORT if not word.startswith("network")]
    target = f"{__name__}.Dropper"
    own = ("network=mlp", f"network._target_={target}", "~network.widths", "data.augment=true")
    seen: dict[str, Any] = {}
    for level in ("O0", "O1", "O2", "O3"):
        for boost in ("O0", "O1"):
            monkeypatch.setattr(Dropper, "seen", [])
            config = ampexp.compose(*words, *own, f"level={level}", f"boost_level={boost}")
            job = build(config)
            job.train_network.network.network.__class__.seen = Dropper.seen
            first = weights(job)
            inputs = torch.cat([batch[0] for batch in job.batches()])
            job = build(config)
            steps(job)
            masks = torch.cat([mask for _, mask in job.train_network.network.network.seen][:6])
            seen[f"{level} {boost}"] = (first, inputs, masks)
    reference = seen["O0 O0"]
    for name, (first, inputs, masks) in seen.items():
        assert all(torch.equal(value, reference[0][key]) for key, value in first.items()), name
        assert torch.equal(inputs, reference[1]), name
        assert torch.equal(masks, reference[2]), name


def test_another_seed_is_another_run_on_the_same_split() -> None:
    one, two = (build(ampexp.compose(*SHORT, f"seed={seed}")) for seed in (0, 1))
    assert not torch.equal(next(iter(weights(one).values())), next(iter(weights(two).values())))
    assert torch.equal(one.data.test.inputs, two.data.test.inputs)
    assert torch.equal(one.held_batches.dataset.inputs, two.held_batches.dataset.inputs)


def test_counts_are_real_and_the_last_batch_is_included() -> None:
    summary = trained(*SMALL, "trainer.epochs=2", "trainer.batch_size=100", "trainer.warmup_steps=3")
    job = build(ampexp.compose(*SMALL, "trainer.batch_size=100"))
    size = len(job.train_batches.dataset)
    assert size % 100 != 0
    assert summary.num_samples == 2 * size
    assert summary.num_steps == 2 * math.ceil(size / 100)
    assert summary.num_timed_steps == summary.num_steps - 3
    assert summary.num_epochs == 2


def test_a_rate_is_samples_over_the_sum_of_seconds() -> None:
    job = build(ampexp.compose(*SHORT))
    from ampexp.summary import Measurements

    measurements = Measurements(job.clock)
    records = []
    for event in train(job):
        if isinstance(event, StepRecord):
            measurements.add(event)
            records.append(event)
    points = measurements.close_window()
    summary = measurements.summary({}, {}, {}, num_epochs=1, final_loss_scale=1.0, peak_tensor_bytes=0)
    timed = [record for record in records if record.timed]
    assert [record.step for record in timed] == [2, 3, 4, 5]
    seconds = [record.marks[1] - record.marks[0] for record in timed]
    assert summary.samples_per_second == pytest.approx(sum(r.num_samples for r in timed) / sum(seconds))
    assert [step for step, _ in points] == list(range(6))
    assert ["step_seconds" in values for _, values in points] == [False, False, True, True, True, True]


def test_a_run_shorter_than_its_warm_up_reports_no_rate() -> None:
    summary = trained(*SHORT, "trainer.warmup_steps=6")
    assert summary.samples_per_second is None
    assert summary.step_seconds_median is None
    assert "samples_per_second" not in summary.metrics()
    assert summary.peak_tensor_bytes > 0


def test_skipped_steps_are_counted_apart_and_not_timed() -> None:
    summary = trained(*SHORT, "level=O2", "trainer.max_steps=16", "trainer.warmup_steps=1")
    assert summary.num_skipped_steps == summary.num_overflows >= 1
    assert summary.num_skipped_samples == 50 * summary.num_skipped_steps
    assert summary.num_timed_steps == 16 - summary.num_skipped_steps  # the step of the warm-up is one of them


def test_memory_is_that_of_the_larger_network() -> None:
    small = trained(*SHORT, "network.widths=[8]").peak_tensor_bytes
    large = trained(*SHORT, "network.widths=[2048]").peak_tensor_bytes
    # weights, gradients and momentum of 64 or 1024 inputs x 2048, four bytes each
    assert large - small > 3 * 4 * 2000 * 64


def test_choices_look_at_the_held_part_and_never_at_the_test_set() -> None:
    config = ampexp.compose(*SMALL, "trainer.epochs=50", "trainer.patience=2", "optimizer.lr=1e-12")
    job = build(config)
    job.test_batches = None  # would raise if touched
    events = [event for event in train(job) if isinstance(event, EpochRecord)]
    assert len(events) < 50
    assert set(events[0].held) == {"loss", "accuracy"}


def test_evaluation_leaves_flags_and_counts_every_sample_once() -> None:
    job = build(ampexp.compose(*SHORT))
    network = job.train_network.network
    frozen = next(module for module in network.modules() if isinstance(module, nn.Linear))
    frozen.eval()
    whole = evaluate(job, job.test_batches)
    assert not frozen.training
    assert network.network.training
    other = build(ampexp.compose(*SHORT, "trainer.eval_batch_size=7"))
    assert evaluate(other, other.test_batches) == pytest.approx(whole, rel=1e-5)
    with evaluating(network):
        assert not any(module.training for module in network.modules())
    test = job.data.test
    logits = network(test.inputs)
    assert whole["accuracy"] == (logits.argmax(1) == test.labels).double().mean().item()


def test_clipping_acts_on_the_unscaled_gradients() -> None:
    clipped = [
        build(ampexp.compose(*SHORT, "trainer.clip_norm=0.01", f"loss_scale_manager={manager}", *words))
        for manager, words in (("none", ()), ("fixed", ("loss_scale_manager.loss_scale=1024",)))
    ]
    norms = [[record.grad_norm.item() for record in steps(job)] for job in clipped]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert max(norms[0]) > 0.01


class LossNetwork(nn.Module):
    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(in_features, num_classes)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x.flatten(1)), label)


def test_a_network_may_return_the_loss_itself() -> None:
    own = (f"network._target_={__name__}.LossNetwork", "~network.widths", "loss=none", "metric=none")
    summary = trained(*SHORT, *own, "level=O3")
    assert set(summary.test) == {"loss"}
    assert 0 < summary.test["loss"] < 10


NO_SGD = ("~optimizer.lr", "~optimizer.momentum", "~optimizer.dampening", "~optimizer.weight_decay",
          "~optimizer.nesterov")  # fmt: skip
NO_FINAL = "~scheduler.final_fraction"


def made_none() -> None:
    """Make nothing."""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["network._target_=no.such.Net"], r"network._target_=no\.such\.Net cannot be found"),
        (["network._target_=ampexp.networks.LeNet"], r"has no 'LeNet' \(did you mean LeNet5\?\)"),
        (["+network.wrong=1"], r"network .* refuses its arguments"),
        (["network._target_=builtins.dict"], "network must be a torch.nn.Module"),
        (["optimizer._target_=torch.optim.LBFGS", "~optimizer.momentum", "~optimizer.weight_decay"], "LBFGS"),
        (["optimizer._target_=builtins.list", *NO_SGD], "^optimizer must be a torch.optim.Optimizer; .* made list"),
        (["+optimizer._partial_=true"], "^optimizer must be .* made (partial|_DeferredTarget)"),
        (["scheduler._target_=builtins.id", "~scheduler.warmup_steps", NO_FINAL], "^scheduler must be .* made int"),
        (["scheduler._target_=builtins.print", "~scheduler.warmup_steps", NO_FINAL], "^scheduler .* made NoneType"),
        (["loss._target_=builtins.dict"], "^loss must be a function .* made dict"),
        (["metric._target_=builtins.dict"], "^metric must be .* made dict without reset, compute"),
        ([f"metric._target_={__name__}.made_none"], "^metric must be .* NoneType without reset, update, compute"),
        (["data=pydoc_topics"], "network.in_features must be a number, or a fact"),
        (["device=cuda"], "cuda"),
        (["data=npz", "data.path=nowhere.npz"], "nowhere.npz"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], said: str) -> None:
    if overrides == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UserError, match=said) as raised:
        trained(*SHORT, *overrides)
    assert "\n" not in str(raised.value)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    trained(*SHORT, "device.threads=2")
    assert torch.get_num_threads() == before


def test_two_jobs_in_one_process_do_not_meet() -> None:
    alone = trained(*SHORT, "level=O3").test
    trained(*SHORT, "level=O2", "boost_level=O1", "seed=7")
    assert trained(*SHORT, "level=O3").test == alone


@pytest.mark.parametrize(
    "network", ["lstm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet20", "transformer"))]
)
def test_the_other_networks_run(network: str) -> None:
    text = network != "resnet20"
    words = ["data=pydoc_topics", "data.sequence_length=16"] if text else []
    summary = trained(
        "tracker=none", "trainer.progress=none", f"network={network}", *words, "level=O2", "trainer.batch_size=8",
        "trainer.epochs=null", "trainer.max_steps=2", "trainer.eval_batch_size=2000" if text else "seed=0",
        "trainer.held_fraction=0",
    )  # fmt: skip
    assert summary.num_steps == 2
    assert 0 <= summary.test["accuracy"] <= 1


def test_the_library_builds_from_a_config(tmp_path: Path) -> None:
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    built = ampexp.compose("level=O2", "boost_level=O1").build(network, optimizer, nn.CrossEntropyLoss())
    assert isinstance(built, TrainNetwork)
    assert built.record["level"] == "O2"
    assert built(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])).loss.dtype == torch.float32
