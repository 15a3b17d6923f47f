"""Laws of a built network's state: copies, state dicts, flags."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.amp.low import LOW_LEVELS, WIDE, built


def copied(train_network: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(train_network)
    if way == "pickle":
        return pickle.loads(pickle.dumps(train_network))
    file = io.BytesIO()
    torch.save(train_network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_copies_use_their_own_weights_and_optimizer(level: str, way: str) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    train_network = built(network, level, boost_level="O1")
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    train_network(x, y)
    clone = copied(train_network, way)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    losses = [clone(x, y).loss.item() for _ in range(3)]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    own = {id(p) for p in clone.network.parameters()}
    assert {id(p) for g in clone.optimizer.param_groups for p in g["params"]} == own
    assert losses == [train_network(x, y).loss.item() for _ in range(3)]
    for name, value in clone.network.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_state_dict_keeps_keys_order_and_dtypes(level: str) -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    network = network.float()
    before = [(name, value.dtype) for name, value in network.state_dict().items()]
    train_network = built(network, level)
    train_network(torch.randn(5, 1, 4, 4), torch.arange(5) % 3)
    for state in (network.state_dict(), train_network.network.state_dict()):
        assert [(name, value.dtype) for name, value in state.items()] == before
    fresh = copy.deepcopy(network)
    train_network.network.load_state_dict(fresh.state_dict())
    assert [name for name, _ in train_network.network.named_parameters()] == [
        name for name, _ in network.named_parameters()
    ]


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_train_and_eval_flags_are_untouched(level: str) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    network[1].eval()
    train_network = built(network, level)
    train_network(torch.randn(5, 4), torch.arange(5) % 3)
    train_network.network(torch.randn(5, 4))
    assert [module.training for module in network.modules()] == [True, True, False]
    train_network.network.eval()
    assert not any(module.training for module in network.modules())
    output = train_network.network(torch.randn(5, 4))
    assert output.dtype == WIDE
    assert not any(module.training for module in network.modules())


def test_a_train_network_moves_like_a_module() -> None:
    """`to` walks the module's own `_apply`."""
    train_network = built(nn.Linear(4, 3), "O1")
    assert train_network.to("cpu") is train_network
