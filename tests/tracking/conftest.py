"""One SQLite store a session, copied for each test: making one takes seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a database that holds no experiment of ours, so that no artifact path is copied."""
    from ampexp.tracking.store import create_store

    database = tmp_path_factory.mktemp("empty") / "mlflow.db"
    create_store(database)
    return database


@pytest.fixture
def launch(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a directory of launch with a store in it, whatever the caller's environment says."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path
