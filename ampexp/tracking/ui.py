"""The browser view: MLflow's own server, lean, on the store that runs go to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from ampexp.messages import UserError, refusal
from ampexp.tracking.signals import Signals, Terminated
from ampexp.tracking.store import find_store, open_store

START_SECONDS = 120
STOP_SECONDS = 10
# in place of fifteen processes and 2 GB: three and 0.5
LEAN = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
QUIET = {"PYTHONWARNINGS": "ignore"}  # what MLflow's own libraries will drop is no matter here


def serve(
    uri: str | None,
    launch_directory: Path,
    host: str = "127.0.0.1",
    port: int = 5000,
    *,
    experiment: str = "ampexp",
) -> None:
    """Show the store in the browser until Ctrl-C; prints the address of the experiment.

    Store and experiment are created if they do not exist yet. A `uri` that is a server already is
    printed and nothing is started.

    Raises:
        UserError: the port is in use, the store does not open, the server does not start.
        Terminated: SIGTERM; the server and its children are gone by then.
    """
    store = find_store(uri, launch_directory)
    if store.lock is not None:
        _check_port(host, port)
    _, experiment_id = open_store(store, experiment)
    page = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if store.lock is None:
        print(f"{store.uri}/{page}", flush=True)
        return
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
        *("--backend-store-uri", store.uri, "--host", host, "--port", str(port)),
        *("--uvicorn-opts", "--log-level warning"),
    ]
    print(f"starting MLflow on {store.public} ...", flush=True)
    with Signals():
        # a session of its own: Ctrl-C reaches us only, and its children end with it as one group
        # what it says goes to standard error: the address is alone on standard output
        server = subprocess.Popen(
            command, env={**os.environ, **LEAN, **QUIET}, start_new_session=True, stdout=2
        )
        try:
            _wait_until_up(server, f"http://{host}:{port}/health")
            print(f"http://{host}:{port}/{page}  (Ctrl-C ends it)", flush=True)
            status = server.wait()
            raise UserError(f"the MLflow server ended by itself with exit status {status}")
        except KeyboardInterrupt:
            print("stopped", flush=True)
        finally:
            _stop(server)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            said = error.strerror if isinstance(error, OSError) else "no such port"
            raise UserError(f"{refusal('port', f'free on {host}', port)} ({said})") from None


def _wait_until_up(server: subprocess.Popen[bytes], address: str) -> None:
    patience = time.monotonic() + START_SECONDS
    local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < patience:
        if server.poll() is not None:
            raise UserError(f"the MLflow server did not start: exit status {server.returncode}")
        with contextlib.suppress(OSError), local.open(address, timeout=5):
            return
        time.sleep(0.2)
    raise UserError(f"the MLflow server did not answer at {address} in {START_SECONDS} seconds")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and its children: politely, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, Terminated, KeyboardInterrupt):
            server.wait(STOP_SECONDS)
