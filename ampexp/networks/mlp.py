"""A perceptron with hidden layers."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Classify inputs of any shape, flattened, with linear layers and ReLU between them.

    Inputs (B, ...) of in_features numbers each -> logits (B, num_classes). `widths` are the hidden layers' sizes;
    without any the network is linear.
    """

    def __init__(
        self, in_features: int, num_classes: int = 10, widths: Sequence[int] = (256, 128)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise((in_features, *widths)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear((in_features, *widths)[-1], num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Give the logits of a batch of inputs."""
        return self.layers(inputs)
