"""Laws of the cast: what it leaves alone, where writes land, and that nothing of it stays."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampexp.amp import auto_mixed_precision, build_train_network
from ampexp.amp.conversion import convert, rebuilt

HALF, WIDE = torch.float16, torch.float32
LOW_LEVELS = ["O1", "O2", "O3"]


def rounded(x: Tensor) -> Tensor:
    return x.detach().half().float()


def built(network: nn.Module, level: str, loss_fn: Any = None, **kwargs: Any) -> Any:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return build_train_network(
        network, optimizer, loss_fn or nn.CrossEntropyLoss(), level=level, loss_scale_manager=None, **kwargs
    )


# --- writes land where the program writes them ---


class Writes(nn.Module):
    """Write to views of buffers and parameters, in place and by out=, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("table", torch.full((3, 4), 0.1))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("product", torch.zeros(2, 3))
        self.plain = nn.Parameter(torch.full((2, 2), 0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table[1].copy_(x[0])
            self.table.view(-1)[8:].fill_(2.0)
            self.table.t()[0, 0] = 5.0
            self.total += x[0]
            torch.mm(x[:2], self.head.weight.t(), out=self.product)
            self.plain.data[0].mul_(2)
            self.plain.select(1, 1).zero_()
        return self.head(x)


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_writes_to_views_land_in_the_originals(level: str) -> None:
    network = Writes()
    homes = {name: value.data_ptr() for name, value in network.state_dict().items()}
    x = torch.randn(5, 4)
    auto_mixed_precision(network, level)(x)
    low = level in ("O2", "O3")
    first = rounded(x[0]) if low else x[0]
    assert torch.equal(network.table[1], first)
    assert network.table[2].tolist() == [2.0] * 4
    assert network.table[0, 0].item() == 5.0
    assert torch.equal(network.table[0, 1:], torch.full((3,), 0.1))  # not written: not rounded
    assert torch.equal(network.total, first)
    torch.testing.assert_close(network.product, x[:2] @ network.head.weight.t(), rtol=1e-2, atol=1e-2)
    assert network.plain[:, 1].tolist() == [0, 0]
    assert network.plain[0, 0].item() == pytest.approx(0.2, abs=1e-4)
    assert network.plain[1, 0].item() == torch.tensor(0.1).item()
    assert {name: value.data_ptr() for name, value in network.state_dict().items()} == homes
    assert {value.dtype for value in network.state_dict().values()} == {WIDE}


class Aliases(nn.Module):
    def forward(self, x: Tensor, out: Tensor) -> tuple[bool, ...]:
        work = x * 1.0
        view = work[0]
        result = work.relu_()
        sums = torch.add(work, 1.0, out=out)
        matrix = torch.zeros(2, 3)
        product = torch.mm(work, work.new_zeros(4, 3), out=matrix)
        added = work.addmm_(work, torch.eye(4))
        return (
            result is work,
            sums is out,
            product is matrix,
            added is work,
            bool(torch.equal(view, work[0])),
        )


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_in_place_and_out_keep_their_aliasing(level: str) -> None:
    out = torch.zeros(2, 4)
    network = nn.ModuleDict({"a": Aliases(), "b": nn.Linear(1, 1)})
    network.forward = network["a"].forward
    assert auto_mixed_precision(network, level)(torch.randn(2, 4), out=out) == (True,) * 5


# --- no cast outlives its forward ---


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_weights_changed_in_place_between_forwards_are_seen(level: str) -> None:
    network, x = nn.Linear(4, 3), torch.randn(2, 4)
    cast = auto_mixed_precision(network, level)
    with torch.no_grad():
        cast(x)
        network.weight.mul_(2.0)
        network.bias.data = torch.ones(3)
        other = nn.Linear(4, 3)
        other.load_state_dict(network.state_dict())
        assert torch.equal(cast(x), auto_mixed_precision(other, level)(x))
    cast(x).sum().backward()
    assert network.weight.grad is not None


class ChangesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.first.weight.mul_(2.0)
        with torch.no_grad():
            z = self.first(x)
        return torch.stack([y.detach(), z])


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_weights_changed_inside_one_forward_are_seen(level: str) -> None:
    network = ChangesItself()
    network.first.bias.data.zero_()
    y, z = auto_mixed_precision(network, level)(torch.randn(2, 4))
    torch.testing.assert_close(z, y * 2, rtol=2e-3, atol=2e-3)


class InnerAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(x)


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_autocast_around_or_inside_changes_nothing(level: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    results = []
    for network in (nn.Linear(4, 3), nn.Linear(4, 3), InnerAutocast()):
        inner = network.head if isinstance(network, InnerAutocast) else network
        inner.load_state_dict({"weight": torch.linspace(-1, 1, 12).view(3, 4), "bias": torch.ones(3)})
        train_network = built(network, level)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(results) == 1):
            losses = [train_network(x, y).loss.item() for _ in range(2)]
        results.append((losses, inner.weight.detach().clone()))
    for losses, weight in results[1:]:
        assert losses == results[0][0]
        assert torch.equal(weight, results[0][1])


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_other_threads_keep_pytorchs_behaviour(level: str) -> None:
    """A thread that works while a step is inside the network sees no cast."""
    found: list[Any] = []

    class Spawns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            def work() -> None:
                ones = torch.ones(2, 4, dtype=WIDE) / 3
                found.append((ones.relu().equal(ones), ones.dtype, F.linear(ones, torch.eye(4)).equal(ones)))

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return super().forward(x)

    built(Spawns(4, 3), level)(torch.randn(5, 4), torch.arange(5) % 3)
    assert found == [(True, WIDE, True)]


def test_an_error_inside_forward_leaves_nothing_active() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    network = nn.Sequential(nn.LayerNorm(4), Fails(4, 3))
    with pytest.raises(KeyError, match="mine"):
        built(network, "O2")(torch.randn(5, 4), torch.arange(5) % 3)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not network[0]._forward_hooks
    assert not network[0]._forward_pre_hooks
    third = torch.tensor([1 / 3])
    assert torch.equal(third.relu(), third)


# --- state and copies ---


def copied(train_network: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(train_network)
    if way == "pickle":
        return pickle.loads(pickle.dumps(train_network))
    file = io.BytesIO()
    torch.save(train_network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_copies_use_their_own_weights_and_optimizer(level: str, way: str) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    train_network = built(network, level, boost_level="O1")
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    train_network(x, y)
    clone = copied(train_network, way)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    losses = [clone(x, y).loss.item() for _ in range(3)]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    own = {id(p) for p in clone.network.parameters()}
    assert {id(p) for g in clone.optimizer.param_groups for p in g["params"]} == own
    assert losses == [train_network(x, y).loss.item() for _ in range(3)]
    for name, value in clone.network.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_state_dict_keeps_keys_order_and_dtypes(level: str) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    network = network.float()
    before = [(name, value.dtype) for name, value in network.state_dict().items()]
    train_network = built(network, level)
    train_network(torch.randn(5, 1, 4, 4), torch.arange(5) % 3)
    for state in (network.state_dict(), train_network.network.state_dict()):
        assert [(name, value.dtype) for name, value in state.items()] == before
    fresh = copy.deepcopy(network)
    train_network.network.load_state_dict(fresh.state_dict())
    assert [name for name, _ in train_network.network.named_parameters()] == [
        name for name, _ in network.named_parameters()
    ]


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_train_and_eval_flags_are_untouched(level: str) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    network[1].eval()
    train_network = built(network, level)
    train_network(torch.randn(5, 4), torch.arange(5) % 3)
    train_network.network(torch.randn(5, 4))
    assert [module.training for module in network.modules()] == [True, True, False]
    train_network.network.eval()
    assert not any(module.training for module in network.modules())
    output = train_network.network(torch.randn(5, 4))
    assert output.dtype == WIDE
    assert not any(module.training for module in network.modules())


def test_a_train_network_moves_like_a_module() -> None:
    """`to` walks the module's own `_apply`."""
    train_network = built(nn.Linear(4, 3), "O1")
    assert train_network.to("cpu") is train_network


# --- batches ---


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
        leaves = batch if isinstance(batch, Tensor) else batch["x"] if isinstance(batch, dict) else None
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
        found = found.x if hasattr(found, "x") else found["x"] if isinstance(found, dict) else found[0]
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


# --- recomputation ---


class Checkpointed(nn.Module):
    def __init__(self, variant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(
            nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.GELU(), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.3),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)
        self.variant = variant

    def inner(self, x: Tensor) -> Tensor:
        return Scale.apply(self.block(x)) + self.head.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.variant is None:
            return self.head(self.inner(x))
        return self.head(checkpoint(self.inner, x, use_reentrant=self.variant))


class Scale(torch.autograd.Function):
    """A user's function whose forward runs without gradient, in recomputation too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 0.3333).relu() * 3.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.gt(0) * (x * 0.3333).cos()


@pytest.mark.parametrize("variant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_recomputation_is_in_the_level(level: str, variant: bool) -> None:
    """Gradients are bitwise those of the network without checkpoints."""
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    gradients = []
    for kind in (None, variant):
        network = Checkpointed(kind)
        train_network = built(network, level)
        torch.manual_seed(9)
        train_network(x, y)
        gradients.append([p.grad.clone() for p in network.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


class Nested(nn.Module):
    """A checkpoint inside a checkpoint: the inner one runs without gradient while the outer is recomputed."""

    def __init__(self, variant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softplus()) for _ in range(3)
        )
        self.variant = variant

    def call(self, function: Any, x: Tensor) -> Tensor:
        return function(x) if self.variant is None else checkpoint(function, x, use_reentrant=self.variant)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return self.call(lambda a: self.call(third, second(a)).exp(), first(x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # PyTorch, of the inner one
@pytest.mark.parametrize("variant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("level", LOW_LEVELS)
def test_nested_recomputation_is_in_the_level(level: str, variant: bool) -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    gradients = []
    for kind in (None, variant):
        network = Nested(kind)
        built(network, level)(x, y)
        gradients.append([p.grad.clone() for p in network.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_double_backward_by_hand_in_the_scope(level: str) -> None:
    """A training loop of one's own around `auto_mixed_precision`, with a gradient penalty."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cast, x = auto_mixed_precision(network, level), torch.randn(5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(cast(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    penalty = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    (exact,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    exact.square().sum().backward()
    wide = [p.grad for p in network.parameters() if p.grad is not None]
    assert any(not torch.equal(a, b) for a, b in zip(penalty, wide, strict=True))
    for a, b in zip(penalty, wide, strict=True):
        assert a.dtype == WIDE
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


# --- what cannot be seen into ---


def opaque(kind: str) -> nn.Module:
    inner = nn.Linear(4, 3)
    if kind == "script":
        return torch.jit.trace(inner, torch.ones(1, 4))
    if kind == "compile":
        return torch.compile(inner)
    return torch.export.export(inner, (torch.ones(1, 4),)).module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["script", "compile", "export"])
def test_opaque_parts_are_refused_at_build(kind: str) -> None:
    network = nn.Sequential(nn.Identity(), nn.ModuleDict({"deep": opaque(kind)})["deep"])
    for level in LOW_LEVELS:
        with pytest.raises(ValueError, match=r"^network\.1 \(.*operators cannot be seen"):
            built(network, level)
    built(network, "O0")
