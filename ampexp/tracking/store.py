"""Finding, creating and opening MLflow's store; its errors as one line."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ampexp.messages import UserError, refusal

# both are read when mlflow is imported, and this module is the only door to it
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
ALLOWED = "sqlite:///path/to/mlflow.db, postgresql://..., mysql://..., mssql://... or http(s)://..."
# for first contact and where nobody should wait; else MLflow's own patience (minutes) holds
QUICK = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
LOCK_SECONDS = 120

if "MLFLOW_LOGGING_LEVEL" not in os.environ:
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # it prints a stack trace of what it raises all the same
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
logging.getLogger("alembic").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Store:
    """Where runs go: the URI for MLflow, the SQLite file if it is one, new experiments' artifacts.

    `artifacts` is a URI, or None where the server decides; `lock` the file that guards creation.
    """

    uri: str
    database: Path | None = None
    artifacts: str | None = None
    lock: Path | None = None

    @property
    def public(self) -> str:
        """The URI without user and password."""
        return self.uri if self.database else re.sub(r"://.*@", "://***@", self.uri)


def find_store(uri: str | None, launch_directory: Path) -> Store:
    """Resolve `uri`, or MLFLOW_TRACKING_URI, or the default, against the directory of the launch.

    Raises:
        UserError: no URI, or one of a kind that MLflow does not take.
    """
    launch = launch_directory.resolve()
    where = "tracker.uri" if uri is not None else "MLFLOW_TRACKING_URI"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or None if uri is None else uri
    if uri is None:
        return _sqlite(launch / "mlflow.db")
    shown = Store(uri).public
    try:
        parts = urlsplit(uri)
        kind, host = parts.scheme.partition("+")[0], parts.hostname
        if kind == "sqlite":
            url = make_url(uri)
            if url.database in (None, "", ":memory:") or url.database.startswith("file:"):
                allowed = "a path such as sqlite:///mlflow.db, for the runs must stay"
                raise UserError(refusal(where, allowed, shown))
            return _sqlite(launch / url.database, dict(url.query))
        if kind in DATABASE_PORTS:
            make_url(uri)
        elif kind == "file" or not parts.scheme:
            raise UserError(f"{refusal(where, ALLOWED, shown)} (MLflow gave up file stores)")
        elif kind not in ("http", "https") or not host or (parts.port or 1) < 1:
            raise UserError(refusal(where, ALLOWED, shown))
    except (ValueError, ArgumentError):
        raise UserError(refusal(where, ALLOWED, shown)) from None
    if kind in DATABASE_PORTS:
        return Store(uri, None, (launch / "mlruns").as_uri(), launch / "mlflow.lock")
    return Store(uri.rstrip("/"))


def open_store(store: Store, experiment: str) -> tuple[MlflowClient, str]:
    """Give a client of the store and the id of the experiment, both created if they are missing.

    Any number of processes may do so at once.

    Raises:
        UserError: the store does not answer, is not one of MLflow's, or refuses the experiment.
    """
    with store_errors(store), quick(), _calm():
        if store.lock is None:
            return _open(store, experiment)
        _check_reachable(store.uri)
        # before the lock: others wait for the work only, not for our imports
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
        from filelock import FileLock, Timeout

        store.lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(store.lock, timeout=LOCK_SECONDS):
                if store.database is not None and not _holds_store(store.database):
                    create_store(store.database)
                return _open(store, experiment)
        except Timeout:
            raise UserError(
                f"the store {store.public} is being created by another process for over"
                f" {LOCK_SECONDS} seconds; if none runs, delete {store.lock}"
            ) from None


def create_store(path: Path) -> None:
    """Make a SQLite store beside its place and move it there: who is killed leaves no half.

    Takes seconds, and no lock: `open_store` is what many processes may call.
    """
    with _calm(), tempfile.TemporaryDirectory(prefix=".mlflow-", dir=path.parent) as new:
        uri = sqlite_uri(Path(new) / path.name)
        MlflowClient(tracking_uri=uri, registry_uri=uri)
        os.replace(Path(new) / path.name, path)


@contextlib.contextmanager
def store_errors(store: Store) -> Iterator[None]:
    """Turn what MLflow, its database or its server raises into one line that names the store."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"the store {store.public} needs the package {error.name}") from error
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        said = str(error).replace(store.uri, store.public)
        if "Max retries exceeded" in said or "timed out" in said or "refused" in said:
            raise UserError(f"no server answers at {store.public}") from error
        line = next((line.strip() for line in said.splitlines() if line.strip()), repr(error))
        raise UserError(f"the store {store.public} failed: {line[:300]}") from error


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Ask servers with little patience inside the block."""
    saved = {name: os.environ.get(name) for name in QUICK}
    os.environ.update(QUICK)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Hide that MLflow uses what SQLAlchemy will drop: no matter of whoever trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def sqlite_uri(path: Path, query: dict[str, Any] | None = None) -> str:
    """Write the URI of a SQLite file, whatever characters its path has.

    Raises:
        UserError: this SQLAlchemy has no way to write the path.
    """
    plain = f"sqlite:///{path}"
    if not query and not set(plain) & set("%?") and make_url(plain).database == str(path):
        return plain
    # with "sqlite:///" MLflow would make the directory of the path as it is escaped
    url = URL.create("sqlite+pysqlite", database=str(path), query=query or {})
    text = url.render_as_string()
    if make_url(text).database != str(path):
        raise UserError(refusal("tracker.uri", "a path without % and ?", str(path)))
    return text


def _sqlite(path: Path, query: dict[str, Any] | None = None) -> Store:
    path = path.resolve()  # of a link the target is replaced, not the link
    artifacts = (path.parent / "mlruns").as_uri()
    return Store(sqlite_uri(path, query), path, artifacts, path.with_name(f"{path.name}.lock"))


def _open(store: Store, experiment: str) -> tuple[MlflowClient, str]:
    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        try:
            return client, client.create_experiment(experiment, store.artifacts)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(experiment)  # another process was faster
    if found is None or found.lifecycle_stage != "active":
        raise UserError(
            f"experiment {experiment!r} is deleted in {store.public}; choose another"
            " tracker.experiment, or bring it back with: mlflow experiments restore"
        )
    return client, found.experiment_id


def _holds_store(path: Path) -> bool:
    """Say whether a SQLite file holds an MLflow store; an empty or missing one does not.

    MLflow itself would ask ten times, for 100 seconds, whether a file is a database.
    """
    if not path.exists():
        return False
    # mode=rw: a journal that a killed writer left is rolled back, no file is created
    reader = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=20)
    with contextlib.closing(reader):
        tables = {name for (name,) in reader.execute("SELECT name FROM sqlite_master")}
    if tables and not {"alembic_version", "experiments"} <= tables:
        raise UserError(refusal("tracker.uri", "a store of MLflow or a new file", str(path)))
    return bool(tables)


def _check_reachable(uri: str) -> None:
    """Knock at a database server's port: MLflow itself would try for 100 seconds."""
    url = make_url(uri)
    if url.host:
        port = url.port or DATABASE_PORTS[url.get_backend_name()]
        socket.create_connection((url.host, port), timeout=5).close()
