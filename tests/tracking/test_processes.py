"""Real processes on a store that does not exist yet, ended in the ways that processes end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest

from ampexp.tracking import open_tracker

# imported once, then forked: four processes that reach the store in the same moment
TRAIN = """
import json, os, sys, time
from pathlib import Path
import mlflow.store.tracking.sqlalchemy_store, torch
import ampexp.tracking.mlflow_tracker
from ampexp.tracking import open_tracker

def train(ending):
    tracker = open_tracker("mlflow", None, "together", ending, Path(sys.argv[1]))
    with tracker.run({"ending": ending}, "", {}) as run:
        run.log_metrics({"loss": 1.0}, 0)
        print(json.dumps([ending, os.getpid(), run.run_id]), flush=True)
        if ending == "exit":
            sys.exit(3)
        if ending in ("SIGTERM", "SIGINT"):
            time.sleep(60)

children = {}
for ending in sys.argv[2:]:
    if (child := os.fork()) == 0:
        # as the command line does, without the seconds that tearing down torch takes
        try:
            train(ending)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except SystemExit as stop:
            code = stop.code
        os._exit(code)
    children[ending] = child
status = {ending: os.waitpid(child, 0)[1] for ending, child in children.items()}
codes = {ending: os.waitstatus_to_exitcode(code) for ending, code in status.items()}
print(json.dumps(codes), flush=True)
os._exit(0)
"""
ENDINGS = {
    "whole": ("FINISHED", 0),
    "exit": ("FAILED", 3),
    "SIGTERM": ("KILLED", 143),
    "SIGINT": ("KILLED", 130),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Start four processes at once, end them, and give (run, exit status) of each."""
    launch = tmp_path_factory.mktemp("fresh store")
    environment = {key: text for key, text in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(launch), *ENDINGS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as parent:
        started = [json.loads(parent.stdout.readline() or "[0, 0, 0]") for _ in ENDINGS]
        for ending, child, _ in started:
            if ending in ("SIGTERM", "SIGINT"):
                os.kill(child, getattr(signal, ending))
        rest, errors = parent.communicate(timeout=60)
    runs = {ending: run_id for ending, _, run_id in started}
    assert set(runs) == set(ENDINGS), errors
    codes = json.loads(rest)  # one line, after the last child: none comes between the starts
    assert "mlflow.store" not in errors, "MLflow and alembic are quiet"
    assert "alembic" not in errors
    return launch, {ending: (runs[ending], codes[ending]) for ending in ENDINGS}


def test_four_processes_start_at_once_on_a_store_that_does_not_exist(ended):
    launch, found = ended
    tracker = open_tracker("mlflow", f"sqlite:///{launch}/mlflow.db", "together", None, launch)
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert {run.info.run_id for run in runs} == {run_id for run_id, _ in found.values()}
    assert all(run.data.metrics == {"loss": 1.0} for run in runs)
    left = {path.name for path in launch.iterdir()}
    assert left <= {"mlflow.db", "mlflow.db.lock", "mlruns"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_status_of_a_process_is_true(ended, ending):
    launch, found = ended
    run_id, code = found[ending]
    tracker = open_tracker("mlflow", f"sqlite:///{launch}/mlflow.db", "together", None, launch)
    run = tracker.client.get_run(run_id)
    assert (run.info.status, code) == ENDINGS[ending]
    assert run.info.run_name == ending


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_ui_shows_the_store_and_ends_with_its_children(tmp_path, number):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = tmp_path / "50% a?b#c"
    launch.mkdir()
    code = (
        "import sys; from pathlib import Path; from ampexp.tracking.ui import serve;"
        f"serve(None, Path(sys.argv[1]), port={port}, experiment='shown here')"
    )
    environment = {key: text for key, text in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-c", code, str(launch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = [process.stdout.readline(), process.stdout.readline()]
            page = "#/experiments/1/runs?workflowType=machine_learning"
            assert f"http://127.0.0.1:{port}/{page}" in lines[1]
            ask = f"experiments/get-by-name?experiment_name={urllib.parse.quote('shown here')}"
            address = f"http://127.0.0.1:{port}/api/2.0/mlflow/{ask}"
            with urllib.request.urlopen(address, timeout=20) as answer:
                assert json.load(answer)["experiment"]["name"] == "shown here"
            tracker = open_tracker("mlflow", f"http://127.0.0.1:{port}", "shown here", None, launch)
            with tracker.run({"a": 1}, "a: 1\n", {}) as run:
                run.log_metrics({"loss": 1.0}, 0)
            kept = tracker.client.get_run(run.run_id)
            assert (kept.info.status, kept.data.metrics) == ("FINISHED", {"loss": 1.0})
            assert run.where.startswith(f"http://127.0.0.1:{port}/#/experiments/1/runs/")
            second = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert f"port must be free on 127.0.0.1; got {port}" in second.stderr
        finally:
            process.send_signal(number)
            process.wait(timeout=40)
    assert process.returncode == (0 if number == signal.SIGINT else 143)
    for _ in range(50):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.1)
    raise AssertionError("a child of the server still listens")
