"""What a run is measured by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Accuracy:
    """Count how often the largest logit is the label's, on whatever device the outputs live.

    Outputs (B, C) with labels (B,), or (B, T, C) with (B, T). The counters are integers, so the result does not
    depend on how the examples were cut into batches; nothing is synchronised before `compute`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.correct: Tensor | int = 0
        self.count = 0

    def update(self, output: Tensor, label: Tensor) -> None:
        """Count one batch; raises ValueError where output and label do not fit each other."""
        if output.shape[:-1] != label.shape:  # == would broadcast them silently
            raise ValueError(
                f"Accuracy needs an output of shape (..., C) for a label of shape (...); "
                f"got {tuple(output.shape)} and {tuple(label.shape)}"
            )
        self.correct = self.correct + (output.argmax(dim=-1) == label).sum()
        self.count += label.numel()

    def compute(self) -> dict[str, float]:
        """Give {"accuracy": the right fraction in [0, 1]}, NaN before the first update."""
        return {"accuracy": int(self.correct) / self.count if self.count else math.nan}
