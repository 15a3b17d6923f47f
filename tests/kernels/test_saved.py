"""What is kept between forward and backward: low-precision tensors, as few as PyTorch keeps, and none afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ampexp.amp import build_train_network
from ampexp.kernels.formats import FORMATS, LOW_DTYPES
from ampexp.kernels.table import SLOW
from tests.kernels.kit import called
from tests.kernels.test_gradients import OPERATORS, call, operands_of


class Box:
    """One saved tensor, to see when it is let go."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # asked under a level, a tensor names the level's dtype
            self.tensor, self.dtype = tensor, tensor.dtype


def seen(func: Callable[[], Any]) -> tuple[Any, list[Box]]:
    boxes: list[Box] = []

    def pack(tensor: Tensor) -> Box:
        boxes.append(Box(tensor))
        return boxes[-1]

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        return func(), boxes


def floating(boxes: list[Box]) -> list[torch.dtype]:
    return [box.dtype for box in boxes if box.dtype.is_floating_point]


NOT_ACTIVATIONS = {"scaled_dot_product_attention": 1, "group_norm": 2}
"""Float32 numbers that are kept, one a row: attention's log-sum-exp, a group's mean and deviation."""


def dtypes_of(name: str) -> list[torch.dtype]:
    return [FORMATS[word].dtype for word in SLOW.get(name, FORMATS)]


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_only_low_tensors_are_saved(name: str, dtype: torch.dtype) -> None:
    low = [x.requires_grad_() for x in operands_of(name, dtype)]
    _, boxes = seen(lambda: call(name, *low))
    wide = [torch.float32] * NOT_ACTIVATIONS.get(name, 0) if dtype in dtypes_of(name) else []
    assert [kind for kind in floating(boxes) if kind is not dtype] == wide


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 4), (3, 4)]),
    "matmul": (torch.matmul, [(2, 5, 4), (2, 4, 3)]),
    "mm": (torch.mm, [(5, 4), (4, 3)]),
    "bmm": (torch.bmm, [(2, 5, 4), (2, 4, 3)]),
}


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_keeps_what_the_wanted_gradient_depends_on(name: str, frozen: int) -> None:
    """Of a frozen weight the input is let go; of an input without gradient the weight is."""
    func, shapes = PRODUCTS[name]
    low = [torch.randn(shape).half() for shape in shapes]
    low[1 - frozen].requires_grad_()
    result, boxes = seen(lambda: called(name, func, tuple(low)))
    assert [box.tensor.shape for box in boxes] == [low[frozen].shape]
    result.float().sum().backward()
    assert low[frozen].grad is None
    assert low[1 - frozen].grad is not None


class Block(nn.Module):
    """The kinds of operators with a rule, and elementary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)
        self.boxes: list[weakref.ref[Box]] = []
        self.dtypes: list[torch.dtype] = []

    def body(self, tokens: Tensor) -> Tensor:
        x = F.gelu(self.conv(self.embedding(tokens)))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(F.silu(x * x.sigmoid()).mean(1).square())

    def forward(self, tokens: Tensor) -> Tensor:
        result, boxes = seen(lambda: self.body(tokens))
        self.dtypes = floating(boxes)
        self.boxes = [weakref.ref(box) for box in boxes]
        return result


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_step_keeps_no_float32_activation_and_frees_all(level: str) -> None:
    network = Block()
    step = build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss(), level,
        loss_scale_manager=None,
    )  # fmt: skip
    step(torch.randint(0, 9, (4, 6)), torch.arange(4) % 3)
    assert len(network.dtypes) > 10
    assert network.dtypes.count(torch.float32) == 1  # attention's log-sum-exp
    assert set(network.dtypes) == {torch.float16, torch.float32}
    assert all(box() is None for box in network.boxes)
