"""Laws of batches: what arrives, what the caller keeps, what is never cast."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ampexp.amp.conversion import convert, rebuilt
from tests.amp.low import HALF, LOW_LEVELS, WIDE, built


@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    x: Any
    name: str = "frozen"


Pair = namedtuple("Pair", "x name")
MARK = object()


class Keeps(nn.Module):
    """Keep what arrived, and give the mean of its floating leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, batch: Any, **kwargs: Any) -> Tensor:
        self.came, self.named = batch, kwargs
        leaves = (
            batch if isinstance(batch, Tensor) else batch["x"] if isinstance(batch, dict) else None
        )
        if leaves is None:
            leaves = batch.x if hasattr(batch, "x") else batch[0]
        while not isinstance(leaves, Tensor):
            leaves = leaves[0] if isinstance(leaves, list | tuple) else leaves["x"]
        with torch._C.DisableTorchFunction():
            self.dtype = leaves.dtype
        return self.head(leaves)


def containers(x: Tensor) -> list[Any]:
    ids = torch.arange(5)
    return [
        x,
        {"x": x, "ids": ids, "mark": MARK},
        [x, ids, MARK],
        (x, ids, MARK),
        Pair(x, MARK),
        Batch(x),
        FrozenBatch(x),
        {"x": [(x, ids), {"x": x}], "mark": MARK},
        Batch([Pair({"x": x}, MARK)]),
    ]


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_the_same_concrete_type_arrives(level: str, index: int) -> None:
    x = torch.randn(5, 4)
    batch = containers(x)[index]
    network = Keeps()
    train_network = built(network, level)
    train_network(batch, torch.arange(5) % 3)
    assert type(network.came) is type(batch)
    assert network.dtype == (HALF if level in ("O2", "O3") else WIDE)
    if isinstance(batch, dict):
        assert network.came is batch
        assert network.came["mark"] is MARK
    if isinstance(batch, tuple | list) and not isinstance(batch, Pair):
        assert network.came[1] is batch[1]
        assert network.came[2] is MARK
    if isinstance(batch, Batch | FrozenBatch):
        assert network.came.name is batch.name
    found = batch
    while not isinstance(found, Tensor):  # the caller's own leaf is still in place
        found = (
            found.x if hasattr(found, "x") else found["x"] if isinstance(found, dict) else found[0]
        )
    assert found is x
    assert x.dtype == WIDE


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_writes_into_a_callers_dict_are_visible(level: str) -> None:
    class Writer(nn.Linear):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            output = super().forward(batch["x"])
            batch["output"] = output
            batch["seen"] = "yes"
            batch["replaced"] = torch.zeros(2)
            batch["parts"].append(1)
            return output

    x, old = torch.randn(5, 4), torch.ones(1)
    batch = {"x": x, "replaced": old, "parts": [x]}
    built(Writer(4, 3), level)(batch, torch.arange(5) % 3)
    assert batch["seen"] == "yes"
    assert batch["output"].shape == (5, 3)
    assert batch["x"] is x
    assert batch["replaced"] is not old
    assert batch["parts"][0] is x
    assert batch["parts"][1] == 1


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_integers_booleans_complex_and_labels_are_never_cast(level: str) -> None:
    seen: dict[str, Any] = {}

    class Sees(nn.Linear):
        def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
            seen.update(kwargs)
            with torch._C.DisableTorchFunction():
                seen["float"] = kwargs["weights"].dtype
            return super().forward(x) + kwargs["weights"]

    given_ = {
        "ids": torch.arange(3),
        "mask": torch.tensor([True]),
        "z": torch.ones(2, dtype=torch.complex64),
        "small": torch.ones(2, dtype=torch.uint8),
    }

    def loss_fn(output: Tensor, label: dict[str, Tensor]) -> Tensor:
        seen["label"] = {name: value.dtype for name, value in label.items()}
        return F.mse_loss(output, label["y"])

    label = {"y": torch.zeros(5, 3, dtype=HALF), "ids": torch.arange(5)}
    train_network = built(Sees(4, 3), level, loss_fn)
    train_network(torch.randn(5, 4), label, weights=torch.ones(3), **given_)
    assert all(seen[name] is value for name, value in given_.items())
    assert seen["float"] == (HALF if level in ("O2", "O3") else WIDE)
    assert seen["label"] == {"y": WIDE, "ids": torch.int64}


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_float16_inputs_reach_operators_as_the_level_says(level: str) -> None:
    class Sees(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = (x.dtype, x.tanh().dtype)
            return super().forward(x)

    for dtype in (HALF, torch.bfloat16, WIDE, torch.float64):
        network = Sees(4, 3)
        built(network, level)(torch.randn(5, 4, dtype=dtype), torch.arange(5) % 3)
        assert network.seen == ((WIDE, WIDE) if level == "O1" else (HALF, HALF))


leaf = st.sampled_from([1, "a", None, True]) | st.sampled_from(
    [WIDE, HALF, torch.float64, torch.int64, torch.bool, torch.complex64]
).map(lambda dtype: torch.ones(2, dtype=dtype))
trees = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
    ),
    max_leaves=6,
)


def same_shape(one: Any, other: Any, dtype: torch.dtype) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.is_floating_point():
            return other.dtype is dtype and (one.dtype is not dtype or one is other)
        return one is other
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_shape(one[k], other[k], dtype) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(
            same_shape(a, b, dtype) for a, b in zip(one, other, strict=True)
        )
    return one is other


@given(trees, st.sampled_from([HALF, WIDE, torch.bfloat16]))
def test_convert_changes_floating_leaves_and_nothing_else(tree: Any, dtype: torch.dtype) -> None:
    converted = convert(tree, dtype)
    assert same_shape(tree, converted, dtype)
    assert same_shape(converted, convert(converted, dtype), dtype)


@given(st.lists(st.integers(), max_size=4))
def test_rebuilt_keeps_the_concrete_type(items: list[int]) -> None:
    for like in ([], (), torch.Size([])):
        assert rebuilt(like, items) == type(like)(items)
        assert type(rebuilt(like, items)) is type(like)
    assert rebuilt(Pair(1, 2), [3, 4]) == Pair(3, 4)
