"""Laws of the levels: what is stored, what a level resolves to, and that builds do not touch each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampexp.amp import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    auto_mixed_precision,
    build_train_network,
)

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {},
    "O1": {},
    "O2": {"loss_scale_manager": DynamicLossScaleManager(1024), "cpu_loss_scaling": True},
    "O3": {},
}


def small_network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3),
    )  # fmt: skip


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(6, 1, 6, 6, generator=generator),
            torch.randint(0, 3, (6,), generator=generator),
        )
        for _ in range(count)
    ]


def built(network: nn.Module, level: str, **kwargs: Any) -> Any:
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    arguments = {**LEVELS[level], **kwargs}
    return build_train_network(network, optimizer, nn.CrossEntropyLoss(), level=level, **arguments)


def trained(train_network: Any) -> list[float]:
    torch.manual_seed(3)
    return [train_network(x, y).loss.item() for x, y in batches()]


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, value), (other_name, other_value) in zip(
        one.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert value.dtype == other_value.dtype
        assert torch.equal(value, other_value), name


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_small_updates_reach_float32_weights(level: str) -> None:
    """Ten steps of 1e-4 on a weight 1.0; a float16 weight would not move at all."""
    network = nn.Linear(1, 1, bias=False)
    network.weight.data.fill_(1.0)
    train_network = build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=1e-4), lambda output, _: output.sum(),
        level=level, **LEVELS[level],
    )  # fmt: skip
    for _ in range(10):
        train_network(torch.ones(1, 1), None)
    assert f"{network.weight.item():.7f}" == "0.9989998"


def test_o0_is_bitwise_a_loop_by_hand() -> None:
    network, by_hand = small_network(), small_network()
    losses = trained(built(network, "O0"))
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.01)
    torch.manual_seed(3)
    expected = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(by_hand(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    assert_same_state(network, by_hand)


def test_auto_on_cpu_is_o0_and_says_so() -> None:
    network, plain = small_network(), small_network()
    train_network = build_train_network(
        network,
        torch.optim.Adam(network.parameters(), lr=0.01),
        nn.CrossEntropyLoss(),
        level="auto",
    )
    assert trained(train_network) == trained(built(plain, "O0"))
    assert_same_state(network, plain)
    assert train_network.record["level"] == "O0"
    assert train_network.record["requested_level"] == "auto"
    assert train_network.record["loss_scale_manager"] == "none"
    assert auto_mixed_precision(plain, "auto") is plain


RECORDS = {
    "O0": ("float32", "float32", "none"),
    "O1": ("float16 white list", "float32", "none"),
    "O2": ("float16", "float32", "dynamic 1024"),
    "O3": ("float16", "float16", "none"),
}


@pytest.mark.parametrize("level", RECORDS)
def test_record_says_what_runs(level: str) -> None:
    record = built(small_network(), level).record
    keys = ("cast_model_type", "keep_batchnorm_fp32", "loss_scale_manager")
    assert tuple(record[key] for key in keys) == RECORDS[level]
    assert record["level"] == record["requested_level"] == level
    assert record["boosts"] == "none"


def test_o2_implies_dynamic_scaling_from_2_to_the_24() -> None:
    train_network = built(small_network(), "O0")
    network = small_network()
    train_network = build_train_network(
        network, torch.optim.Adam(network.parameters()), nn.CrossEntropyLoss(), level="O2",
        cpu_loss_scaling=True,
    )  # fmt: skip
    assert train_network.record["loss_scale_manager"] == f"dynamic {2**24:g}"
    assert train_network(*batches()[0]).loss_scale.item() == 2**24


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_o0_after_another_level_is_a_true_o0(level: str) -> None:
    network, fresh = small_network(), small_network()
    start = copy.deepcopy(network.state_dict())
    trained(built(network, level))
    network.load_state_dict(start)
    assert trained(built(network, "O0")) == trained(built(fresh, "O0"))
    assert_same_state(network, fresh)


def remains(network: nn.Module) -> Any:
    """Everything that a build could have left on the modules."""
    return [
        (
            path,
            type(module),
            sorted(vars(module)),
            [len(getattr(module, name)) for name in sorted(vars(module)) if "hooks" in name],
            module.forward.__func__,
            module.training,
        )
        for path, module in network.named_modules()
    ]


def test_ten_builds_leave_nothing_behind() -> None:
    network = small_network()
    before = remains(network), [(k, v.dtype, v.shape) for k, v in network.state_dict().items()]
    parameters = list(network.parameters())
    for level in ("O1", "O2", "O3", "O0", "O1") * 2:
        built(network, level)(*batches()[0])
        built(network, level, boost_level="O1")(*batches()[0])
    after = remains(network), [(k, v.dtype, v.shape) for k, v in network.state_dict().items()]
    assert after == before
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    assert all(p.requires_grad and not p._backward_hooks for p in network.parameters())
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("levels", [("O1", "O3"), ("O2", "O2"), ("O0", "O2")])
def test_two_train_networks_do_not_influence_each_other(levels: tuple[str, str]) -> None:
    alone = []
    for level in levels:
        network = small_network()
        network[4].p = 0.0
        alone.append((trained(built(network, level)), network))
    networks = [small_network() for _ in levels]
    for network in networks:
        network[4].p = 0.0
    pair = [built(network, level) for network, level in zip(networks, levels, strict=True)]
    losses: list[list[float]] = [[], []]
    for x, y in batches():
        for train_network, seen in zip(pair, losses, strict=True):
            seen.append(train_network(x, y).loss.item())
    for (expected, network), seen, other in zip(alone, losses, networks, strict=True):
        assert seen == expected
        assert_same_state(network, other)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cast_model_type_decides_whatever_the_level_says(level: str) -> None:
    """float16 converts the whole network at any level; float32 casts nothing at any level."""
    keep = {"keep_batchnorm_fp32": False, "loss_scale_manager": None}
    half = built(small_network(), level, cast_model_type=torch.float16, **keep)
    assert trained(half) == trained(built(small_network(), "O3"))
    wide = built(small_network(), level, cast_model_type=torch.float32, loss_scale_manager=None)
    assert trained(wide) == trained(built(small_network(), "O0"))
    assert half.record["cast_model_type"] == "float16"
    assert wide.record["cast_model_type"] == "float32"
    brain = built(small_network(), level, cast_model_type=torch.bfloat16, **keep)
    assert trained(brain) != trained(half)
    assert brain.record["keep_batchnorm_fp32"] == "bfloat16"


def test_keep_batchnorm_fp32_overrides_the_level() -> None:
    none = {"loss_scale_manager": None}
    o2, o3 = trained(built(small_network(), "O2", **none)), trained(built(small_network(), "O3"))
    assert o2 != o3
    assert trained(built(small_network(), "O2", keep_batchnorm_fp32=False, **none)) == o3
    assert trained(built(small_network(), "O3", keep_batchnorm_fp32=True)) == o2


def test_loss_scale_manager_overrides_the_level() -> None:
    fixed = FixedLossScaleManager(64, drop_overflow_update=False)
    train_network = built(small_network(), "O1", loss_scale_manager=fixed)
    assert train_network(*batches()[0]).loss_scale.item() == 64
    plain = built(small_network(), "O2", loss_scale_manager=None, cpu_loss_scaling=False)
    assert plain(*batches()[0]).loss_scale.item() == 1


@pytest.mark.parametrize("argument", ["cast_model_type", "keep_batchnorm_fp32"])
@pytest.mark.parametrize("value", [None, "float16", 1])
def test_overrides_of_wrong_kind(argument: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^{argument} must be .*; got {value!r}"):
        built(small_network(), "O1", **{argument: value})


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_storage_is_float32_at_every_level(level: str) -> None:
    """Parameters, gradients, buffers and optimizer state."""
    train_network = built(small_network(), level)
    trained(train_network)
    network = train_network.network.network
    stored = [*network.parameters(), *(p.grad for p in network.parameters()), *network.buffers()]
    stored += [
        value
        for state in train_network.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    assert {value.dtype for value in stored} == {torch.float32, torch.int64}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_checkpoints_move_freely_between_levels(level: str) -> None:
    train_network = built(small_network(), level)
    trained(train_network)
    saved = train_network.network.state_dict()
    plain = small_network()
    plain.load_state_dict(saved)
    assert_same_state(plain, train_network.network.network)
    assert list(saved) == list(plain.state_dict())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_same_dropout_masks_at_every_level(level: str) -> None:
    def masks(level: str) -> list[Tensor]:
        seen: list[Tensor] = []
        network = nn.Sequential(
            nn.Linear(4, 50), nn.Dropout(0.4), nn.Dropout1d(0.2), nn.Linear(50, 2)
        )
        network[1].register_forward_hook(lambda *call: seen.append(call[2].ne(0)))
        network[2].register_forward_hook(lambda *call: seen.append(call[2].ne(0)))
        train_network = built(network, level)
        torch.manual_seed(5)
        for _ in range(2):
            train_network(torch.ones(7, 4), torch.zeros(7, dtype=torch.long))
        return [*seen, torch.get_rng_state()]

    torch.manual_seed(4)
    expected = masks("O0")
    torch.manual_seed(4)
    for mask, other in zip(masks(level), expected, strict=True):
        assert torch.equal(mask, other)
