"""Fixed splits: the same rows whatever the seed of the run."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ampexp.data.dataset import Tensors
from ampexp.messages import UserError, refusal


def hold_out(
    dataset: Dataset, fraction: float, stratified: bool = True
) -> tuple[Dataset, Dataset | None]:
    """Divide a map-style data set into (rest, held) where held has `fraction` of the items, fixed for all seeds.

    With `stratified` every label keeps its share, within one item; items whose labels are no single integers are
    divided by a fixed permutation. Without it the last items are held. Both parts keep the order of the items.
    Fraction 0 gives (dataset, None). Raises UserError for a fraction outside [0, 1) and where a part would be empty.
    """
    if not 0 <= fraction < 1:
        raise UserError(refusal("the held fraction", "a number from 0 to below 1", fraction))
    if fraction == 0:
        return dataset, None
    size = len(dataset)  # type: ignore[arg-type]
    labels = _labels(dataset) if stratified else None
    if stratified:
        held = spread(torch.zeros(size) if labels is None else labels, fraction)
    else:
        held = torch.arange(size - _share(size, fraction), size)
    return _parts(dataset, held, size)


def spread(labels: Tensor, fraction: float) -> Tensor:
    """Choose `fraction` of the rows so that every label (N,) gives its share, within one row; rows in order.

    The rows are shuffled by a fixed permutation, sorted by label, and taken at equal distances.
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    by_label = shuffled[labels[shuffled].argsort(stable=True)]
    num_held = _share(len(labels), fraction)
    # the middle of each of num_held equal stretches, in whole numbers
    places = (2 * torch.arange(num_held) + 1) * len(labels) // (2 * num_held)
    return by_label[places].sort().values


def _share(size: int, fraction: float) -> int:
    num_held = max(1, round(fraction * size))
    if num_held >= size:
        raise UserError(f"a held fraction of {fraction} leaves nothing of {size} items to train on")
    return num_held


def _parts(dataset: Dataset, held: Tensor, size: int) -> tuple[Dataset, Dataset]:
    left = torch.ones(size, dtype=torch.bool)
    left[held] = False
    rest = left.nonzero().flatten()
    if isinstance(dataset, Tensors):
        return dataset.take(rest), dataset.take(held)
    return Subset(dataset, rest.tolist()), Subset(dataset, held.tolist())


def _labels(dataset: Dataset) -> Tensor | None:
    """Read all labels (N,), or None where they are not one integer each."""
    if isinstance(dataset, Tensors):
        labels = dataset.labels
        return labels if labels.dim() == 1 and not labels.is_floating_point() else None
    found: list[int] = []
    for row in range(len(dataset)):  # type: ignore[arg-type]
        item = dataset[row]
        try:
            found.append(operator.index(item[-1]))
        except (KeyError, TypeError, ValueError):
            return None
    return torch.tensor(found)
