"""What only a CUDA device can show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ampexp
from ampexp.amp import PrecisionError, build_train_network
from ampexp.job import run
from tests.amp.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")


def on_device(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda item: item.to(CUDA), value)


def test_auto_is_o2_with_dynamic_scaling() -> None:
    network = nn.Linear(4, 2).to(CUDA)
    built = build_train_network(network, torch.optim.SGD(network.parameters(), lr=0.1), nn.MSELoss(), level="auto")
    assert built.record["level"] == "O2"
    assert built.record["arithmetic"] == "native"
    output = built(torch.randn(3, 4, device=CUDA), torch.randn(3, 2, device=CUDA))
    assert all(value.device.type == "cuda" for value in output)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", [name for name in ZOO if "batch" not in name or name == "batch_norm_net"])
def test_the_zoo_trains(name: str, level: str) -> None:
    torch.manual_seed(0)
    network, (inputs, label) = ZOO[name]()
    network = network.to(CUDA)
    # lengths stay on the CPU
    inputs = (inputs[0].to(CUDA), inputs[1]) if name == "packed_sequence" else on_device(inputs)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), level=level)
    refused = ""
    try:
        losses = [train_network(*inputs, label.to(CUDA)).loss.item() for _ in range(30)]
    except PrecisionError as error:
        refused = str(error)
    if refused:
        assert level in ("O2", "O3")
        assert "network" in refused
        assert "float16" in refused
    else:
        assert min(losses[-5:]) < losses[0]


def test_dropout_masks_are_the_same_at_every_level() -> None:
    masks = []
    for level in ("O0", "O1", "O2", "O3"):
        seen: list[torch.Tensor] = []
        network = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 2)).to(CUDA)
        network[1].register_forward_hook(lambda *call, seen=seen: seen.append(call[2].detach() != 0))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), level=level)
        torch.manual_seed(1)
        train_network(torch.ones(32, 64, device=CUDA), torch.zeros(32, dtype=torch.long, device=CUDA))
        masks.append(seen[0])
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_a_step_without_a_skip_decision_does_not_synchronise() -> None:
    network = nn.Linear(4, 2).to(CUDA)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), level="O3")
    batch = torch.randn(3, 4, device=CUDA), torch.tensor([0, 1, 0], device=CUDA)
    train_network(*batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_network(*copy.copy(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_main_job(level: str) -> None:
    summary = run(ampexp.compose("device=cuda", "tracker=none", "trainer.epochs=5", f"level={level}", "boost_level=O1"))
    assert summary.test["accuracy"] > 0.9
    assert summary.samples_per_second is not None
    assert summary.peak_tensor_bytes > 0
