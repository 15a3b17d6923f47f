from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ampexp
from ampexp.job import build
from ampexp.messages import UserError
from ampexp.trainer import evaluate

SMALL = ("tracker=none", "data=digits", "network=mlp", "trainer.progress=none")


class Measure:
    """A metric that gives what it is told to."""

    gives: Any = None

    def reset(self) -> None: ...

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None: ...

    def compute(self) -> Any:
        return self.gives


@pytest.mark.parametrize(
    ("gives", "shown"),
    [
        (None, "null"), ("3", "'3'"), ({"a": 1, "b": [2]}, "[2]"), (torch.ones(2), "an object of type Tensor"),
        (1j, "an object of type complex"),
    ],
)  # fmt: skip
def test_a_metric_gives_numbers(gives: Any, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measure, "gives", gives)
    job = build(ampexp.compose(*SMALL, f"metric._target_={__name__}.Measure"))
    with pytest.raises(UserError) as raised:
        evaluate(job, job.test_batches)
    assert str(raised.value) == f"metric: Measure.compute() must give a number or a dict of numbers; got {shown}"
    for number in (1, np.float32(1), torch.ones(1), {"measure": torch.tensor(1)}):
        monkeypatch.setattr(Measure, "gives", number)
        assert evaluate(job, job.test_batches)["measure"] == 1
