"""What the tests of the cast share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampexp.amp import build_train_network

HALF, WIDE = torch.float16, torch.float32
LOW_LEVELS = ["O1", "O2", "O3"]


def rounded(x: Tensor) -> Tensor:
    return x.detach().half().float()


def built(network: nn.Module, level: str, loss_fn: Any = None, **kwargs: Any) -> Any:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return build_train_network(
        network,
        optimizer,
        loss_fn or nn.CrossEntropyLoss(),
        level=level,
        loss_scale_manager=None,
        **kwargs,
    )
