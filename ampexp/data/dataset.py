"""What a data set is: two parts, what a network must know about them, and a digest of their content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ampexp.messages import UserError, refusal

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Changes a batch of inputs at random, drawing from the given generator only."""


@dataclass(frozen=True)
class DataSet:
    """Two map-style data sets whose items are (input, label), and what belongs to them.

    `facts` holds the numbers that a network's size depends on, as far as they apply: num_classes, in_channels,
    image_size, in_features, vocab_size, sequence_length. `digest` is the sha256 of the content in its split, empty
    where the data are a user's own objects. `augment` is for training batches. `stratified` says that held parts are
    drawn label by label; without it they are the last items, as text demands.
    """

    name: str
    train: Dataset
    test: Dataset
    facts: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""
    augment: Augment | None = None
    stratified: bool = True


class Batch(tuple[Tensor, ...]):
    """A batch that was cut as a whole and needs no collating."""

    __slots__ = ()


class Tensors(Dataset):
    """Examples in memory: inputs (N, ...) and labels (N, ...) as two tensors."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        if len(inputs) != len(labels):
            raise ValueError(
                f"as many labels as inputs are needed; got {len(inputs)} and {len(labels)}"
            )
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Give many examples at once; a DataLoader asks for its batches so."""
        rows = torch.from_numpy(np.array(indices))  # a third of what torch.tensor costs
        return Batch((self.inputs.index_select(0, rows), self.labels.index_select(0, rows)))

    def take(self, rows: Tensor) -> Tensors:
        """Give the examples of these rows as a data set of their own."""
        return Tensors(self.inputs[rows], self.labels[rows])


def as_dataset(obj: object) -> DataSet:
    """Accept a DataSet, a pair (train, test) or an object with .train and .test.

    Of such an object `facts`, `digest`, `augment`, `stratified` and `name` are taken where it has them. Raises
    UserError for anything else, and for parts that are empty or not map-style (with __len__ and __getitem__).
    """
    if isinstance(obj, DataSet):
        return obj
    if isinstance(obj, (tuple, list)) and len(obj) == 2:
        train, test = obj
    elif hasattr(obj, "train") and hasattr(obj, "test"):
        train, test = obj.train, obj.test
    else:
        allowed = "a DataSet, a pair (train, test) of map-style data sets, or an object with .train and .test"
        raise UserError(f"data must be {allowed}; got {_kind(obj)}")
    for part, name in ((train, "train"), (test, "test")):
        if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise UserError(
                f"{name} of the data must be a map-style data set (__len__ and __getitem__); got {_kind(part)}"
            )
        if len(part) == 0:
            raise UserError(refusal(f"the length of {name} of the data", "at least 1", 0))
    return DataSet(
        name=getattr(obj, "name", type(train).__name__),
        train=train,
        test=test,
        facts=getattr(obj, "facts", {}),
        digest=getattr(obj, "digest", ""),
        augment=getattr(obj, "augment", None),
        stratified=getattr(obj, "stratified", True),
    )


def _kind(obj: object) -> str:
    length = f" of {len(obj)}" if isinstance(obj, (tuple, list)) else ""
    return f"{type(obj).__name__}{length}"
