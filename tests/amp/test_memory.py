"""What low precision saves: the peak of the tensors alive during a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampexp.amp import build_train_network
from ampexp.networks import LeNet5, ResNet20, Transformer
from ampexp.trainer import MemoryMeter


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def parts(name: str) -> tuple[nn.Module, object, tuple[Tensor, Tensor]]:
    if name == "transformer":
        tokens = torch.zeros(8, 64, dtype=torch.long)
        return Transformer(64, 64, 32, 2), token_loss, (tokens, tokens)
    network, channels, size = (LeNet5(), 1, 64) if name == "lenet5" else (ResNet20(), 3, 16)
    batch = (torch.randn(size, channels, 32, 32), torch.arange(size) % 10)
    return network, nn.CrossEntropyLoss(), batch


def peak_bytes(name: str, level: str) -> int:
    network, loss_fn, batch = parts(name)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    train_network = build_train_network(network, optimizer, loss_fn, level, cpu_loss_scaling=True)
    train_network(*batch)
    meter = MemoryMeter(torch.device("cpu"))
    with meter.measured(train_network, batch):
        train_network(*batch)
    return meter.peak_bytes()


@pytest.mark.parametrize("name", ["lenet5", "resnet20", "transformer"])
def test_the_peak_at_o2_and_o3_is_below_that_at_o0(name: str) -> None:
    whole = peak_bytes(name, "O0")
    assert peak_bytes(name, "O2") < 0.95 * whole
    assert peak_bytes(name, "O3") < 0.95 * whole
