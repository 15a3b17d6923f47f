"""What every option of the groups of this room has to be."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("data", "loss", "metric", "network", "optimizer", "scheduler")
OPTIONS = [path for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_first_line_is_a_sentence(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert "_target_" in OmegaConf.load(path)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_every_optimizer_moves_a_weight(name):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = instantiate(
        OmegaConf.load(CONF / "optimizer" / f"{name}.yaml"), [weight], _convert_="all"
    )
    weight.square().sum().backward()
    optimizer.step()
    assert (weight < 1).all()
