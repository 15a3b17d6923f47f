"""Batches in order, or shuffled by a generator of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ampexp.data.dataset import Batch


def loader(
    dataset: Dataset,
    batch_size: int,
    generator: torch.Generator | None = None,
    num_workers: int = 0,
) -> DataLoader:
    """Give the loader of a map-style data set, whose last batch may be smaller.

    With a generator every pass is shuffled anew by one draw from it, the same at any number of workers; without one
    the items come in order. The global random stream is never drawn from.
    """
    return DataLoader(
        dataset,
        batch_sampler=_Batches(len(dataset), batch_size, generator),  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=_collate,
        persistent_workers=num_workers > 0,
        # seeds the workers; without it DataLoader draws from the global stream, and an evaluation more or less would
        # change the dropout masks that follow
        generator=torch.Generator().manual_seed(generator.initial_seed() if generator else 0),
    )


class _Batches:
    """The rows of each batch."""

    def __init__(self, size: int, batch_size: int, generator: torch.Generator | None) -> None:
        self.size = size
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        if self.generator is None:
            rows = list(range(self.size))
        else:
            rows = torch.randperm(self.size, generator=self.generator).tolist()
        for start in range(0, self.size, self.batch_size):
            yield rows[start : start + self.batch_size]


def _collate(items: Any) -> Any:
    return items if isinstance(items, Batch) else default_collate(items)
