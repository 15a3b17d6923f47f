"""Gradient centralisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampexp.boost.base import Boost, Update


def centralize(grad: Tensor) -> Tensor:
    """Take from each output unit's gradient its own mean: g_i <- g_i - mean(g_i) over all axes but the first.

    A sparse gradient, (rows, ...) with its values (entries, ...), is centralised row by row and stays sparse.

    Source: Yong et al., Gradient Centralization, 2020, arXiv:2004.01461; `gc_flag` of MindSpore's `less_bn`.

    >>> centralize(torch.tensor([[1.0, 3.0], [0.0, 4.0]]))
    tensor([[-1.,  1.],
            [-2.,  2.]])
    """
    if grad.dim() < 2:  # a bias has one number a unit: its mean is itself, and nothing would remain
        return grad
    if grad.is_sparse:
        grad = grad.coalesce()
        if grad.sparse_dim() != 1:
            return grad
        return torch.sparse_coo_tensor(
            grad.indices(),
            centralize(grad.values()),
            grad.shape,
            check_invariants=False,
            is_coalesced=True,
        )
    return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)


class GradCentralization(Boost):
    """Centralise the gradients of all weights of two or more dimensions before each update.

    Source: Yong et al., Gradient Centralization, 2020, arXiv:2004.01461.
    """

    def rewrite(self, network: nn.Module) -> None:
        """Count the weights that are centralised."""
        count = sum(
            parameter.requires_grad and parameter.dim() > 1 for parameter in network.parameters()
        )
        self.effect = f"{count} weights centralised"

    def wrap(self, update: Update, network: nn.Module) -> Update:
        """Centralise, then update."""

        def centralized() -> None:
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter.grad = centralize(parameter.grad)
            update()

        return centralized
