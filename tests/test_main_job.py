"""The main job as a user runs it: the command, a process of its own, a real store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ampexp
from ampexp.tracking import open_tracker
from ampexp.tracking.store import create_store
from tests.conftest import CommandLine


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    create_store(database)
    return database


@pytest.fixture
def launch(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = tmp_path / "launch"
    directory.mkdir()
    shutil.copy(empty_database, directory / "mlflow.db")
    return directory


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in leaves(item, f"{path}.{name}").items()}
    return {path.lstrip("."): value}


def runs_of(launch: Path) -> tuple[Any, list[Any]]:
    client = open_tracker("mlflow", None, "ampexp", None, launch).client
    experiment = client.get_experiment_by_name("ampexp")
    return client, client.search_runs([experiment.experiment_id])


def test_what_the_command_trains_stands_in_the_store(command_line: CommandLine, launch: Path) -> None:
    words = (
        "level=O2", "boost_level=O1", "network=mlp", "data=digits", "trainer.epochs=2", "trainer.log_every_steps=2",
    )  # fmt: skip
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for said in ("level                         O2", "grad_freeze", "recorded at", "mlflow.db"):
        assert said in done.stdout
    client, (run,) = runs_of(launch)
    assert run.info.status == "FINISHED"
    for key, value in leaves(ampexp.compose(*words).to_dict()).items():
        assert any(name == key or name.startswith(f"{key}.") for name in run.data.params), (key, value)
    assert run.data.params["level"] == "O2"
    assert run.data.tags["resolved.level"] == "O2"
    assert run.data.tags["resolved.arithmetic"]
    metrics = run.data.metrics
    steps = int(metrics["num_steps"])
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [point.step for point in history] == list(range(0, steps, 2))
    scales = client.get_metric_history(run.info.run_id, "loss_scale")
    assert scales[0].value == 2**24
    assert {"test_accuracy", "test_loss", "samples_per_second", "peak_tensor_bytes", "held_accuracy"} <= set(metrics)
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "environment.txt", "summary.txt", "model"} <= artifacts
    folder = Path(client.download_artifacts(run.info.run_id, "config.yaml", str(launch)))
    assert yaml.safe_load(folder.read_text())["level"] == "O2"


def test_a_sweep_is_one_run_a_job(command_line: CommandLine, launch: Path) -> None:
    done = command_line(
        "-m", "level=O0,O3", "network=mlp", "data=digits", "trainer.epochs=null", "trainer.max_steps=3",
        "tracker.log_model=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, runs = runs_of(launch)
    assert sorted(run.data.tags["resolved.level"] for run in runs) == ["O0", "O3"]


def test_what_happened_before_a_failure_is_in_the_run(
    launch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(launch)
    (launch / "planted_failure.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head, self.count = torch.nn.Linear(1024, 10), 0\n"
        "    def forward(self, x):\n"
        "        self.count += 1\n"
        "        if self.count == 4:\n"
        "            raise KeyError('planted')\n"
        "        return self.head(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(str(launch))
    config = ampexp.compose("data=digits", "network._target_=planted_failure.Net", *[f"~network.{key}" for key in
                            ("num_classes", "in_channels", "image_size")], "trainer.progress=none")  # fmt: skip
    with pytest.raises(KeyError, match="planted"):
        ampexp.run(config)
    client, (run,) = runs_of(launch)
    assert run.info.status == "FAILED"
    assert "planted" in run.data.tags["error"]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train_loss")] == [0, 1, 2]
    assert "traceback.txt" in {item.path for item in client.list_artifacts(run.info.run_id)}


def test_the_recorded_model_is_the_users_own_network(launch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(launch)
    summary = ampexp.run(ampexp.compose("level=O3", "network=mlp", "data=digits", "trainer.max_steps=3",
                                        "trainer.epochs=null", "trainer.progress=none"))  # fmt: skip
    import mlflow

    _, (run,) = runs_of(launch)
    assert run.info.run_id == summary.run_id
    folder = open_tracker("mlflow", None, "ampexp", None, launch).client.download_artifacts(run.info.run_id, "model")
    loaded = mlflow.pytorch.load_model(folder)
    assert type(loaded).__name__ == "MLP"
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.float32}
