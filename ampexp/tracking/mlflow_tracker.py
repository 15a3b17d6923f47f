"""Runs in MLflow: params, metrics by step, tags, artifacts and the model."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.entities import Metric, Param, RunTag

from ampexp.messages import UserError
from ampexp.tracking.environment import describe_environment, installed_packages
from ampexp.tracking.keys import (
    MAX_TAG,
    MAX_VALUE,
    as_text,
    encode_key,
    flatten,
    is_cut,
    storable,
)
from ampexp.tracking.recording import Point, RecordedRun, log
from ampexp.tracking.store import find_store, open_store, quick, store_errors

if TYPE_CHECKING:
    from torch import nn

MAX_METRICS_A_BATCH = 1000
MAX_PARAMS_A_BATCH = 100
REQUIREMENTS = ("torch", "mlflow")  # of a saved model; a network's own package is its user's


class MlflowTracker:
    """One experiment of one store; any number of trackers may live in a process."""

    def __init__(
        self, uri: str | None, experiment: str, run_name: str | None, launch_directory: Path
    ) -> None:
        """Open the store; the parameters are those of `open_tracker`."""
        self.store = find_store(uri, launch_directory)
        self.client, self.experiment_id = open_store(self.store, experiment)
        self.experiment = experiment
        self.run_name = run_name
        self.launch_directory = launch_directory
        self.where = f"{self.store.public}, experiment {experiment}"

    def run(
        self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]
    ) -> AbstractContextManager[MlflowRun]:
        """Record one run."""
        return MlflowRun(self).recorded(config, config_yaml, tags)

    def address(self, run_id: str) -> str:
        """Say how to open a run in the browser."""
        page = f"#/experiments/{self.experiment_id}/runs/{run_id}"
        if self.store.lock is None:
            return f"{self.store.public}/{page}"
        return f"{self.store.public}, run {run_id} (ampexp ui, then http://127.0.0.1:5000/{page})"


class MlflowRun(RecordedRun):
    """One run; metric and tag names go through `encode_key`."""

    def __init__(self, tracker: MlflowTracker) -> None:
        """Prepare a run; it exists when its block is entered."""
        super().__init__()
        self.where = tracker.where
        self._tracker = tracker
        self._client = tracker.client
        self._long_keys: dict[str, str] = {}
        self._long_keys_kept = 0

    def flush(self) -> None:
        """Send what is remembered; a store that fails is reported and asked again next time."""
        with quick():
            super().flush()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set words that describe the run; over 5,000 characters they are cut."""
        with self._sending() as run_id:
            for batch in batches(self._tags(tags), MAX_PARAMS_A_BATCH):
                self._client.log_batch(run_id, tags=batch)

    def log_text(self, text: str, name: str) -> None:
        """Keep a text as the artifact `name`."""
        with self._sending() as run_id:
            self._client.log_text(run_id, text.encode("utf-8", "backslashreplace").decode(), name)

    def log_model(self, network: nn.Module, example: Any) -> None:
        """Keep the network as the artifact `model`; the tag `model_format` says how.

        `mlflow.pytorch`: it loads again with `mlflow.pytorch.load_model`, which was tried.
        `state_dict`: pickle cannot carry this network; `model/state_dict.pt` holds its tensors.
        The network is not run; `example`, if it is a tensor, gives the input's dtype and shape.
        """
        import torch

        with tempfile.TemporaryDirectory() as scratch, self._sending() as run_id:
            folder = Path(scratch) / "model"
            form = "mlflow.pytorch"
            try:
                _save(network, example, folder)
            except Exception as error:  # pickle raises what the network's own code raises
                log.warning(
                    "the network is kept as a state_dict, it cannot be saved whole: %s", error
                )
                form = "state_dict"
                folder = Path(scratch) / "state"
                folder.mkdir()
                torch.save(network.state_dict(), folder / "state_dict.pt")
            self._client.log_artifacts(run_id, str(folder), "model")
        self.set_tags({"model_format": form})

    def _begin(self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]) -> None:
        environment = describe_environment(self._tracker.launch_directory)
        words = {**environment, "mlflow.source.name": "ampexp", "mlflow.source.type": "LOCAL"}
        if "git_commit" in environment:
            words["mlflow.source.git.commit"] = environment["git_commit"]
        with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
            words["mlflow.user"] = getpass.getuser()
        leaves = flatten(config)
        with quick(), store_errors(self._tracker.store):
            run = self._client.create_run(
                self._tracker.experiment_id,
                tags={tag.key: tag.value for tag in self._tags({**words, **tags})},
                run_name=self._tracker.run_name,
            )
            self.run_id, self._exists = run.info.run_id, True
            self.where = self._tracker.address(self.run_id)
            params = [
                Param(self._key(key), storable(as_text(value), MAX_VALUE))
                for key, value in leaves.items()
            ]
            for batch in batches(params, MAX_PARAMS_A_BATCH):
                self._client.log_batch(self.run_id, params=batch)
        self.log_text(json.dumps(leaves, indent=1, default=str), "params.json")
        self.log_text(config_yaml, "config.yaml")
        self.log_text(installed_packages(), "environment.txt")
        self._keep_long_keys()

    def _send(self, points: list[Point]) -> None:
        metrics = [Metric(self._key(p.key), p.value, p.timestamp, p.step) for p in points]
        with self._sending() as run_id:
            for batch in batches(metrics, MAX_METRICS_A_BATCH):
                self._client.log_batch(run_id, metrics=batch)
        self._keep_long_keys()

    def _finish(self, status: str, error: BaseException | None) -> None:
        # who was stopped or has failed should not wait minutes for a server that is gone
        with contextlib.nullcontext() if status == "FINISHED" else quick():
            super()._finish(status, error)

    def _end(self, status: str) -> None:
        self._keep_long_keys()
        with self._sending() as run_id:
            self._client.set_terminated(run_id, status)

    def _tags(self, tags: Mapping[str, str]) -> list[RunTag]:
        return [RunTag(self._key(key), storable(text, MAX_TAG)) for key, text in tags.items()]

    def _key(self, text: str) -> str:
        key = encode_key(text)
        if is_cut(key):
            self._long_keys[key] = text
        return key

    def _keep_long_keys(self) -> None:
        if len(self._long_keys) > self._long_keys_kept:
            self.log_text(json.dumps(self._long_keys, indent=1), "keys.json")
            self._long_keys_kept = len(self._long_keys)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[str]:
        if self.run_id is None:
            raise UserError("a run takes values inside its block only")
        # an exception out of a signal, inside a transaction, would leave the database locked
        with self._signals.hold(), store_errors(self._tracker.store):
            yield self.run_id


def batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Give the items in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _save(network: nn.Module, example: Any, folder: Path) -> None:
    """Save as an MLflow model and load it again, in silence: its warnings are about pickle."""
    noisy = logging.getLogger("mlflow")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import mlflow.pytorch
            import torch
            from mlflow.models import infer_signature

            signature: Any = False  # MLflow's word for none
            if isinstance(example, torch.Tensor):
                signature = infer_signature(example.detach().cpu().numpy())
            mlflow.pytorch.save_model(
                network,
                folder,
                signature=signature,
                serialization_format="pickle",  # the module itself; "pt2" is a traced graph of it
                # given, not inferred: inference starts a process and takes ten seconds
                pip_requirements=[f"{name}=={metadata.version(name)}" for name in REQUIREMENTS],
            )
            mlflow.pytorch.load_model(str(folder))
    finally:
        noisy.setLevel(level)
