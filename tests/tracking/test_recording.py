"""The laws of a run, on the tracker that keeps plain dicts."""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ampexp.messages import UserError
from ampexp.tracking import Terminated, open_tracker
from ampexp.tracking.memory import MemoryRun, MemoryTracker


@pytest.fixture
def tracker(tmp_path):
    tracker = open_tracker("none", None, "e", None, tmp_path)
    assert isinstance(tracker, MemoryTracker)
    return tracker


def record(run, act):
    """Log one step, then do what ends the run."""
    with run.recorded({}, "", {}):
        run.log_metrics({"loss": 1.0}, 0)
        act()


def test_nothing_heavy_is_imported_with_the_package():
    code = "import sys, ampexp.tracking as t; print({'torch', 'mlflow', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_unknown_tracker_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="one of mlflow, none; got 'mlfow'.*mlflow"):
        open_tracker("mlfow", None, "e", None, tmp_path)


def test_a_run_keeps_what_it_is_given(tracker):
    with tracker.run({"a": {"b": 1}}, "a: {b: 1}", {"level": "O2"}) as run:
        values = {"loss": 2.0}
        run.log_metrics(values, step=3)
        values["loss"] = 9.0  # the caller's dict is the caller's
        assert run.metrics == {}, "nothing is sent before flush"
        run.flush()
        run.log_metrics({"loss": 1.0}, step=4)
        run.log_summary({"accuracy": 0.5})
        run.set_tags({"more": "x"})
        run.log_text("hello", "a.txt")
    assert run.params == {"a.b": 1}
    assert [(p.value, p.step) for p in run.metrics["loss"]] == [(2.0, 3), (1.0, 4)]
    assert [(p.value, p.step) for p in run.metrics["accuracy"]] == [(0.5, 4)]
    assert run.summary == {"accuracy": 0.5}
    assert run.tags == {"level": "O2", "more": "x"}
    assert run.texts == {"config.yaml": "a: {b: 1}", "a.txt": "hello"}
    assert run.status == "FINISHED"
    assert tracker.runs == [run]


def test_nothing_is_sent_before_a_flush(tracker):
    with tracker.run({}, "", {}) as run:
        for step in range(3):
            run.log_metrics({"loss": 1.0, "lr": 0.1}, step)
        assert not run.metrics
        run.flush()
        assert set(run.metrics) == {"loss", "lr"}


def test_nan_and_inf_become_divergence(tracker):
    with tracker.run({}, "", {}) as run:
        run.log_metrics({"loss": 1.0, "norm": math.inf}, 16)
        run.log_metrics({"loss": math.nan, "norm": 1.0}, 17)
        run.flush()
        run.log_metrics({"loss": -math.inf, "late": math.nan}, 18)
    assert (
        run.tags["diverged"]
        == "norm is inf at step 16; loss is nan at step 17; late is nan at step 18"
    )
    assert [p.value for p in run.metrics["diverged_step"]] == [16]
    sent = [p.value for points in run.metrics.values() for p in points]
    assert all(map(math.isfinite, sent))
    assert [p.value for p in run.metrics["loss"]] == [1.0]


def test_a_run_without_divergence_has_no_word_of_it(tracker):
    with tracker.run({}, "", {}) as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert "diverged" not in run.tags
    assert "diverged_step" not in run.metrics


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("a\nb"), "FAILED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("text"), "FAILED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(None), "FINISHED"),
        (KeyboardInterrupt(), "KILLED"),
        (Terminated(), "KILLED"),
    ],
)
def test_the_status_is_true_and_the_exception_passes_on(error, status):
    def act():
        raise error

    run = MemoryRun()
    with pytest.raises(type(error)) as raised:
        record(run, act)
    assert raised.value is error
    assert run.status == status
    assert len(run.metrics["loss"]) == 1, "the buffer is flushed in every case"
    assert ("traceback.txt" in run.texts) == (status == "FAILED")
    if isinstance(error, ValueError):
        assert run.tags["error"] == "ValueError: a b"
        assert "in act" in run.texts["traceback.txt"]


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signals_end_a_run_as_killed_and_handlers_come_back(number, error):
    def act():
        os.kill(os.getpid(), number)
        time.sleep(1)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run = MemoryRun()
    with pytest.raises(error) as raised:
        record(run, act)
    assert run.status == "KILLED"
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    if error is Terminated:
        assert raised.value.code == 143


class SignalledRun(MemoryRun):
    """A run that gets SIGTERM while it begins or ends."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def _begin(self, *given):
        if self.moment == "begin":
            os.kill(os.getpid(), signal.SIGTERM)
        super()._begin(*given)

    def _send(self, points):
        if self.moment == "end":
            os.kill(os.getpid(), signal.SIGTERM)
        super()._send(points)


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_a_signal_at_the_border_of_a_run_leaves_no_run_without_status(moment):
    run, trained = SignalledRun(moment), False
    with pytest.raises(Terminated), run.recorded({}, "", {}):
        trained = True
    assert trained == (moment == "end")
    assert run.status == "KILLED"


def test_outside_the_main_thread_signals_are_left_alone(tracker):
    seen = []

    def train():
        with tracker.run({}, "", {}) as run:
            seen.append(signal.getsignal(signal.SIGTERM))
        seen.append(run.status)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM), "FINISHED"]


def test_an_ignored_signal_stays_ignored(tracker):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with tracker.run({}, "", {}) as run:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.status == "FINISHED"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_dies_of_sigterm_as_any_process(tracker):
    with tracker.run({}, "", {}) as run:
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert run.status == "FINISHED"


class FailingRun(MemoryRun):
    """A run whose store is gone for a while."""

    gone = True

    def _send(self, points):
        if self.gone:
            raise UserError("no server answers")
        super()._send(points)


def test_a_store_that_is_gone_for_a_while_loses_nothing(caplog):
    run = FailingRun()
    with caplog.at_level(logging.WARNING), run.recorded({}, "", {}):
        run.log_metrics({"loss": 1.0, "norm": math.nan}, 0)
        run.flush()
        assert "no server answers" in caplog.text
        run.gone = False
        run.log_metrics({"loss": 2.0}, 1)
    assert [(p.value, p.step) for p in run.metrics["loss"]] == [(1.0, 0), (2.0, 1)]
    assert run.tags["diverged"] == "norm is nan at step 0"


def test_a_store_that_stays_away_fails_a_run_that_finished():
    run = FailingRun()
    with pytest.raises(UserError, match="no server"), run.recorded({}, "", {}):
        run.log_metrics({"loss": 1.0}, 0)
    assert run.status == "FAILED"


def test_a_failing_store_does_not_hide_the_trainings_own_exception(caplog):
    run = FailingRun()
    with pytest.raises(ZeroDivisionError):
        record(run, lambda: 1 / 0)
    assert "incomplete: no server answers" in caplog.text
    assert "ZeroDivisionError" in run.texts["traceback.txt"]
    assert run.status == "FAILED"
