"""What a boost may do: three places in a step, each doing nothing by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

Update = Callable[[], None]


class Boost:
    """A method that makes training faster; the train network never asks which one it is.

    `effect`: what the boost does to this network, one line for the record, known after `rewrite`.
    """

    effect: str = ""

    def rewrite(self, network: nn.Module) -> None:
        """Look at the network, or change it, once at build."""

    def select(self, step: int) -> AbstractContextManager[None]:
        """Choose what takes part in step `step` (from 0); the choice ends with the context."""
        return nullcontext()

    def wrap(self, update: Update, network: nn.Module) -> Update:
        """Give the update with something before or after it; `update` moves the weights by their gradients."""
        return update


def trainable(network: nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Give the names and parameters that train, in the order of the network."""
    return (
        (name, parameter)
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    )
