"""The law of the levels: a batch and a network that train at O0 train at every level, or are refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ampexp.amp import build_train_network
from tests.amp.zoo import REFUSED, ZOO

LEVELS = {
    "O0": {},
    "O1": {},
    "O2": {"cpu_loss_scaling": True},
    "O3": {},
    "auto": {},
    "bfloat16": {"level": "O2", "cast_model_type": torch.bfloat16, "loss_scale_manager": None},
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ZOO)
def test_trains_or_is_refused(name: str, level: str) -> None:
    torch.manual_seed(0)
    network, (inputs, label) = ZOO[name]()
    before = {key: (value.dtype, value.shape) for key, value in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    arguments = {"level": level, **LEVELS[level]}
    if arguments["level"] == "O2" and "loss_scale_manager" not in arguments:
        from ampexp.amp import DynamicLossScaleManager

        arguments["loss_scale_manager"] = DynamicLossScaleManager(1024)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), **arguments)

    if level in REFUSED.get(name, ()) or (level == "bfloat16" and "O2" in REFUSED.get(name, ())):
        with pytest.raises(RuntimeError, match=r"network.* \w*float16"):
            train_network(*copy.deepcopy(inputs), label)
        return

    outputs = [train_network(*inputs, label) for _ in range(15)]
    losses = [output.loss.item() for output in outputs]
    assert all(output.loss.dtype == torch.float32 for output in outputs)
    assert not any(output.overflow for output in outputs)
    assert min(losses[-5:]) < losses[0], losses
    for parameter in network.parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
    after = {key: (value.dtype, value.shape) for key, value in network.state_dict().items()}
    assert after == before
    assert list(after) == list(before)
    assert train_network.network(*inputs).dtype == torch.float32
