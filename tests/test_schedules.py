"""Laws of every learning-rate schedule."""

import copy
import itertools
import math
import pickle
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ampexp import schedules
from ampexp.messages import UserError
from ampexp.schedules import Constant, Cosine, Step

OPTIONS = sorted((Path(__file__).parents[1] / "conf" / "scheduler").glob("*.yaml"))

factors = st.floats(0.01, 1.0)
lengths = st.tuples(st.integers(1, 400), st.integers(0, 100))
every_schedule = st.one_of(
    lengths.map(lambda n: Constant(*n)),
    st.builds(lambda n, final: Cosine(*n, final), lengths, factors),
    st.builds(lambda n, drops, gamma: Step(*n, drops, gamma), lengths, st.integers(0, 5), factors),
)


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)


@settings(deadline=None)  # a busy machine is no fault
@given(every_schedule)
def test_rises_linearly_from_one_part_to_the_whole_then_never_rises(schedule):
    warm = [schedule(step) for step in range(schedule.warmup_steps)]
    assert warm == [(step + 1) / schedule.warmup_steps for step in range(schedule.warmup_steps)]
    rest = [schedule(step) for step in range(schedule.warmup_steps, schedule.total_steps + 3)]
    assert all(before >= after for before, after in itertools.pairwise(rest))
    if schedule.total_steps > schedule.warmup_steps:
        assert rest[0] == 1.0


@settings(deadline=None)
@given(every_schedule, st.integers(0, 1000))
def test_stays_within_zero_and_one(schedule, step):
    assert 0 <= schedule(step) <= 1


@settings(deadline=None)
@given(st.builds(lambda n, final: Cosine(*n, final), lengths, factors))
def test_cosine_makes_no_jump(schedule):
    steepest = max(
        1 / max(1, schedule.warmup_steps),
        math.pi / 2 / max(1, schedule.total_steps - schedule.warmup_steps),
    )
    values = [schedule(step) for step in range(schedule.total_steps + 1)]
    assert all(abs(a - b) <= steepest + 1e-9 for a, b in itertools.pairwise(values))


@settings(deadline=None)
@given(st.integers(20, 400), st.integers(0, 10), st.integers(0, 5), factors)
def test_each_schedule_ends_where_it_says(total, warmup, drops, value):
    assert Constant(total, warmup)(total) == 1.0
    assert Cosine(total, warmup, value)(total) == pytest.approx(value)
    assert Step(total, warmup, drops, value)(total - 1) == pytest.approx(value**drops)
    for beyond in (total, total + 1, 10 * total):
        assert Step(total, warmup, drops, value)(beyond) == pytest.approx(value**drops)
        assert Cosine(total, warmup, value)(beyond) == pytest.approx(value)


def test_step_drops_at_equal_distances():
    values = [Step(90, 0, num_drops=2, gamma=0.5)(step) for step in range(90)]
    assert values == [1.0] * 30 + [0.5] * 30 + [0.25] * 30


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_every_option_sets_the_learning_rate_and_survives_a_checkpoint(path):
    def made():
        return instantiate(OmegaConf.load(path), optimizer(), 200)

    schedule = made()
    factor = schedule.lr_lambdas[0]
    assert pickle.loads(pickle.dumps(factor)) == factor == copy.deepcopy(factor)
    assert schedule.get_last_lr() == [2.0 * factor(0)]
    for _ in range(120):
        schedule.optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(2.0 * factor(120))]

    other = instantiate(OmegaConf.load(path), optimizer(), 999, warmup_steps=3)
    other.load_state_dict(pickle.loads(pickle.dumps(schedule.state_dict())))
    other.optimizer.step()
    other.step()
    assert other.get_last_lr() == [pytest.approx(2.0 * factor(121))]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda o: schedules.constant(o, 0), "total_steps must be an integer of at least 1; got 0"),
        (
            lambda o: schedules.cosine(o, 9, -1),
            "warmup_steps must be an integer of at least 0; got -1",
        ),
        (
            lambda o: schedules.cosine(o, 9, 0, 1.5),
            "final_fraction must be a number from 0 to 1; got 1.5",
        ),
        (
            lambda o: schedules.step(o, 9, num_drops=-1),
            "num_drops must be an integer of at least 0; got -1",
        ),
        (
            lambda o: schedules.step(o, 9, gamma=0),
            "gamma must be a number above 0 and at most 1; got 0",
        ),
    ],
)
def test_values_out_of_range_are_refused(make, text):
    with pytest.raises(UserError, match=f"scheduler.{text}"):
        make(optimizer())
