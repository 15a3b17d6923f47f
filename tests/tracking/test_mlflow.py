"""The laws of a run on MLflow's real SQLite store."""

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import sqlite3
import threading
import time
import warnings
from pathlib import Path

import mlflow
import pytest
import torch

from ampexp.messages import UserError
from ampexp.tracking import Terminated, open_tracker
from ampexp.tracking.store import find_store

pytestmark = pytest.mark.filterwarnings("error")


def artifact(launch, run, name):
    return launch / "mlruns" / run.run_id / "artifacts" / name


def test_a_run_is_kept_whole(launch):
    config = {
        "optimizer": {"lr": 0.1},
        "deep": {f"k{i}": i for i in range(230)},
        "text": "y" * 9000,
    }
    config["n"] = None
    tracker = open_tracker("mlflow", None, "e", "my run", launch)
    with tracker.run(config, "level: O2\n", {"level": "O2"}) as run:
        for step in range(450):
            run.log_metrics({"loss": 1.0 / (step + 1), "acc@1": 0.5, "same": 1.0}, step)
        run.flush()
        run.log_summary({"test_accuracy": 0.75})
        run.log_text("a \ud800 b", "notes.txt")
    kept = tracker.client.get_run(run.run_id)
    assert kept.info.status == "FINISHED"
    assert kept.info.run_name == "my run"
    assert kept.info.end_time >= kept.info.start_time
    assert len(kept.data.params) == 233
    assert kept.data.params["optimizer.lr"] == "0.1"
    assert kept.data.params["n"] == "null"
    assert len(kept.data.params["text"]) == 6000
    assert kept.data.params["text"].endswith("... (9000 characters)")
    assert json.loads(artifact(launch, run, "params.json").read_text())["text"] == "y" * 9000
    assert artifact(launch, run, "config.yaml").read_text() == "level: O2\n"
    assert "mlflow==" in artifact(launch, run, "environment.txt").read_text()
    assert artifact(launch, run, "notes.txt").read_text() == "a \\ud800 b"
    history = tracker.client.get_metric_history(run.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [
        (i, 1 / (i + 1)) for i in range(450)
    ]
    last = {point.step for point in tracker.client.get_metric_history(run.run_id, "test_accuracy")}
    assert last == {449}
    assert kept.data.tags["level"] == "O2"
    assert kept.data.tags["torch_version"].startswith(torch.__version__)
    assert str(launch / "mlflow.db") in tracker.where
    assert f"#/experiments/{tracker.experiment_id}/runs/{run.run_id}" in run.where


def test_nan_and_inf_never_reach_the_store(launch):
    tracker = open_tracker("mlflow", None, "e", None, launch)
    with tracker.run({}, "", {}) as run:
        run.log_metrics({"loss": 1.0, "scale": 2.0}, 16)
        run.log_metrics({"loss": math.nan, "scale": math.inf}, 17)
    kept = tracker.client.get_run(run.run_id)
    assert kept.data.tags["diverged"] == "loss is nan at step 17; scale is inf at step 17"
    assert kept.data.metrics == {"loss": 1.0, "scale": 2.0, "diverged_step": 17.0}
    with contextlib.closing(sqlite3.connect(launch / "mlflow.db")) as database:
        rows = database.execute("select value, is_nan from metrics where run_uuid=?", [run.run_id])
        assert sorted(rows) == [(1.0, 0), (2.0, 0), (17.0, 0)]


def divide_by_zero(tracker, runs, before=lambda run: None):
    with tracker.run({}, "", {}) as run:
        runs.append(run)
        run.log_metrics({"loss": 1.0}, 0)
        before(run)
        _ = 1 / 0


def test_the_traceback_is_in_the_run(launch):
    tracker, runs = open_tracker("mlflow", None, "e", None, launch), []
    with pytest.raises(ZeroDivisionError):
        divide_by_zero(tracker, runs)
    [run] = runs
    kept = tracker.client.get_run(run.run_id)
    assert kept.info.status == "FAILED"
    assert kept.data.tags["error"] == "ZeroDivisionError: division by zero"
    assert kept.data.metrics == {"loss": 1.0}
    assert "1 / 0" in artifact(launch, run, "traceback.txt").read_text()


def test_a_store_that_goes_away_does_not_hide_the_trainings_exception(launch, caplog):
    tracker = open_tracker("mlflow", None, "e", None, launch)

    def lose_the_run(run):
        tracker.client.delete_run(run.run_id)
        run.flush()
        assert "metrics are kept" in caplog.text

    with pytest.raises(ZeroDivisionError):
        divide_by_zero(tracker, [], lose_the_run)
    assert "incomplete" in caplog.text


@pytest.mark.parametrize("seconds", [0.2, 0.25, 0.3])
def test_a_signal_while_metrics_are_written_locks_and_loses_nothing(launch, seconds):
    tracker, runs, steps = open_tracker("mlflow", None, "e", None, launch), [], []

    def write_without_end():
        with tracker.run({}, "", {}) as run:
            runs.append(run)
            threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGTERM]).start()
            while True:
                steps.append(len(steps))
                run.log_metrics({f"k{i}": 1.0 for i in range(100)}, steps[-1])
                run.flush()

    with pytest.raises(Terminated):
        write_without_end()
    assert tracker.client.get_run(runs[0].run_id).info.status == "KILLED"
    kept = tracker.client.get_metric_history(runs[0].run_id, "k0")
    assert len(steps) - 1 <= len(kept) <= len(steps)


@pytest.mark.parametrize("name", ["a b", "ü中", "50%20", "a#b", "a?b=c", "a&b=c;d+e@f:g"])
def test_directories_may_have_any_name(tmp_path, empty_store, name, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    launch = tmp_path / name
    launch.mkdir()
    shutil.copy(empty_store, launch / "mlflow.db")
    tracker = open_tracker("mlflow", None, "e", None, launch)
    with tracker.run({"a": 1}, "a: 1\n", {}) as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert artifact(launch, run, "config.yaml").read_text() == "a: 1\n"
    assert tracker.client.list_artifacts(run.run_id)
    assert os.listdir(tmp_path) == [name], "nothing beside it, under an escaped name"
    with contextlib.closing(sqlite3.connect(launch / "mlflow.db")) as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)


def test_two_trackers_live_in_one_process_and_leave_mlflow_alone(launch, tmp_path, empty_store):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(empty_store, other / "mlflow.db")
    before = os.environ.get("MLFLOW_TRACKING_URI")
    trackers = [open_tracker("mlflow", None, "e", None, place) for place in (launch, other)]
    with trackers[0].run({}, "", {}) as first, trackers[1].run({}, "", {}) as second:
        first.log_metrics({"x": 1.0}, 0)
        second.log_metrics({"x": 2.0}, 0)
    for tracker, run, value in zip(trackers, (first, second), (1.0, 2.0), strict=True):
        found = tracker.client.search_runs([tracker.experiment_id])
        assert [(r.info.run_id, r.data.metrics["x"]) for r in found] == [(run.run_id, value)]
    assert os.environ.get("MLFLOW_TRACKING_URI") == before
    assert mlflow.active_run() is None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


def test_the_model_loads_again(launch, capfd):
    network, example = Net(), torch.randn(3, 4)
    tracker = open_tracker("mlflow", None, "e", None, launch)
    with tracker.run({}, "", {}) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        random = torch.get_rng_state()
        run.log_model(network, example)
        assert torch.equal(torch.get_rng_state(), random)
        assert network.training
    assert tracker.client.get_run(run.run_id).data.tags["model_format"] == "mlflow.pytorch"
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    loaded = mlflow.pytorch.load_model(str(artifact(launch, run, "model"))).eval()
    assert torch.equal(loaded(example), network.eval()(example))


def test_a_network_that_pickle_cannot_carry_is_kept_as_its_state(launch):
    network = Net()
    network.lock = threading.Lock()
    tracker = open_tracker("mlflow", None, "e", None, launch)
    with tracker.run({}, "", {}) as run:
        run.log_model(network, torch.zeros(2, 4))
    assert tracker.client.get_run(run.run_id).data.tags["model_format"] == "state_dict"
    state = torch.load(artifact(launch, run, "model/state_dict.pt"))
    assert torch.equal(state["linear.weight"], network.linear.weight)


def test_where_a_run_goes(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert find_store(None, tmp_path).uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert find_store("sqlite:///runs/x.db", tmp_path).database == tmp_path / "runs/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://example.org:5000/")
    assert find_store(None, tmp_path).uri == "http://example.org:5000"
    assert find_store("sqlite:////x.db", tmp_path).database == Path("/x.db")
    assert "secret" not in find_store("postgresql://me:secret@host/db", tmp_path).public


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "mlruns",
        "file:mlruns",
        "file:///tmp/mlruns",
        "sqlite://",
        "sqlite:///:memory:",
        "htp://x",
    ]
    + ["http://", "http://[x", "http://h:99999", "http://h:port", "sqlite:x", "postgresql://h:p:q"],
)
def test_other_places_are_refused_in_one_line(tmp_path, uri):
    with pytest.raises(UserError, match=r"tracker\.uri must be") as raised:
        open_tracker("mlflow", uri, "e", None, tmp_path)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["http", "postgresql"])
def test_a_server_that_is_not_there_is_told_in_seconds(tmp_path, kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"{kind}://user:secret@127.0.0.1:{free.getsockname()[1]}/x"
        start = time.monotonic()
        with pytest.raises(UserError, match="no server answers at") as raised:
            open_tracker("mlflow", uri, "e", None, tmp_path)
    assert time.monotonic() - start < 60  # MLflow's own retries take many minutes
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("no database at all " * 100)
    with pytest.raises(UserError, match="file is not a database"):
        open_tracker("mlflow", "sqlite:///text.db", "e", None, tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "own.db")) as database:
        database.execute("create table mine (x)")
    with pytest.raises(UserError, match=r"must be a store of MLflow.*own\.db"):
        open_tracker("mlflow", "sqlite:///own.db", "e", None, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="failed: "):
        open_tracker("mlflow", "sqlite:///file/below/x.db", "e", None, tmp_path)


def test_a_deleted_experiment_is_told_with_the_way_out(launch):
    tracker = open_tracker("mlflow", None, "gone", None, launch)
    tracker.client.delete_experiment(tracker.experiment_id)
    with pytest.raises(UserError, match="'gone' is deleted.*restore"):
        open_tracker("mlflow", None, "gone", None, launch)


def test_mlflow_is_quiet_unless_something_is_wrong(launch, capfd):
    tracker = open_tracker("mlflow", None, "quiet", None, launch)
    with tracker.run({"long": "x" * 7000}, "", {}) as run:
        run.log_metrics({"x": 1.0}, 0)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert logging.getLogger("mlflow").isEnabledFor(logging.ERROR)
