"""The mean cross entropy over every label of a batch."""

from torch import Tensor, nn
from torch.nn import functional as F


class CrossEntropy(nn.Module):
    """Take the mean of -log softmax(logits)[label] over all labels.

    Serves one label an example (logits (B, C), labels (B,)) and one a position (logits (B, T, C), labels (B, T)).
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Give the scalar loss in nats a label."""
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
