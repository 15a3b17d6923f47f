"""Parity with MindSpore 2.10: the files of tests/golden, with the tolerances that their README derives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.amp import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    build_train_network,
)
from ampexp.amp.loss_scale import DynamicLossScale
from ampexp.boost import freeze_schedule

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(24, 16)
        self.fc2 = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


class ConvBN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.gelu(self.bn(self.conv(x))).mean((2, 3)))


class MLPNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 20)
        self.norm = nn.LayerNorm(20)
        self.fc2 = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.norm(self.fc1(x))))


NETS = {"lenet": LeNet, "conv_bn": ConvBN, "mlp_norm": MLPNorm}
TRAJECTORIES = golden("trajectories")
STARTS = {record["net"]: record for record in reversed(TRAJECTORIES) if "init" in record}
DTYPES = {"float16": torch.float16, "float32": torch.float32}


def train(net: str, level: str, overrides: dict[str, Any]) -> tuple[list[float], nn.Module]:
    """Train the six recorded steps with ampexp."""
    start = STARTS[net]
    network = NETS[net]()
    network.load_state_dict({k: torch.tensor(v) for k, v in start["init"].items()}, strict=False)
    given = {key: DTYPES.get(value, value) for key, value in overrides.items()}
    train_network = build_train_network(
        network,
        torch.optim.SGD(network.parameters(), lr=start["lr"], momentum=start["momentum"]),
        nn.CrossEntropyLoss(),
        level=level,
        loss_scale_manager=None,
        **given,
    )
    batches = zip(start["x"], start["y"], strict=True)
    return [
        train_network(torch.tensor(x), torch.tensor(y)).loss.item() for x, y in batches
    ], network


def name_of(record: dict[str, Any]) -> str:
    return "-".join([record["net"], record["level"], *map(str, record["overrides"].values())])


def casts_nothing(record: dict[str, Any]) -> bool:
    """Say whether the documentation promises float32 throughout; there MindSpore itself departs from it."""
    cast = record["overrides"].get("cast_model_type")
    return cast == "float32" or (record["level"] == "O0" and cast is None)


@pytest.mark.parametrize("record", TRAJECTORIES, ids=name_of)
def test_trajectory(record: dict[str, Any]) -> None:
    losses, network = train(record["net"], record["level"], record["overrides"])

    assert record["param_dtypes"] == ["Float32"]
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    if not casts_nothing(record):
        torch.testing.assert_close(losses, record["losses"], rtol=0, atol=8e-4)
        return
    plain = next(r for r in TRAJECTORIES if r["net"] == record["net"] and r["level"] == "O0")
    torch.testing.assert_close(losses, plain["losses"], rtol=0, atol=1e-5)
    state = network.state_dict()
    for name, value in plain["final"].items():
        torch.testing.assert_close(state[name], torch.tensor(value), rtol=0, atol=1e-5, msg=name)
    plain_losses, plain_network = train(record["net"], "O0", {})
    assert losses == plain_losses
    for name, value in plain_network.state_dict().items():
        assert torch.equal(state[name], value), name


def test_every_trajectory_is_there() -> None:
    assert len(TRAJECTORIES) == 36


class Probe(nn.Module):
    """Record what stands between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            self.seen.append((x.dtype, bool(torch.equal(x.half().to(x.dtype), x))))
        return x


HALF, ROUNDED, WIDE = (torch.float16, True), (torch.float32, True), (torch.float32, False)
PROBED = {
    # level: after conv, bn, gelu, relu, layer norm, linear
    "O0": [WIDE, WIDE, WIDE, WIDE, WIDE, WIDE],
    "O1": [ROUNDED, WIDE, WIDE, ROUNDED, WIDE, ROUNDED],
    "O2": [HALF, HALF, HALF, HALF, HALF, HALF],
    "O3": [HALF, HALF, HALF, HALF, HALF, HALF],
}


def probed_network() -> tuple[nn.Sequential, list[Probe]]:
    torch.manual_seed(0)
    probes = [Probe() for _ in range(6)]
    layers = [
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4),
    ]  # fmt: skip
    parts = [part for pair in zip(layers, probes, strict=True) for part in pair]
    return nn.Sequential(*parts, nn.Flatten(1)), probes


@pytest.mark.parametrize("level", PROBED)
def test_dtypes_and_roundings_between_layers(level: str) -> None:
    network, probes = probed_network()
    seen_by_loss: list[Any] = []

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        seen_by_loss.extend([output.dtype, label.dtype])
        return F.cross_entropy(output, label)

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    train_network = build_train_network(
        network, optimizer, loss_fn, level=level, loss_scale_manager=None
    )
    train_network(torch.randn(5, 1, 6, 6), torch.arange(5))
    assert [probe.seen[0] for probe in probes] == PROBED[level]
    assert seen_by_loss == [torch.float32, torch.int64]


def recording(kind: type[nn.Module], size: int) -> nn.Module:
    """Make a norm that records what its inside computes in, and what it gives."""

    class Recording(kind):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            self.inside = (x.sin().dtype, output.dtype)
            return output

    return Recording(size)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.LayerNorm])
def test_norms_compute_in_float32_at_o2_only(kind: type[nn.Module], level: str) -> None:
    probe = Probe()
    network = nn.Sequential(recording(kind, 4), probe, nn.Linear(4, 2))
    train_network = build_train_network(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        level=level,
        loss_scale_manager=None,
    )
    train_network(torch.randn(6, 4), torch.arange(6) % 2)
    dtype = torch.float32 if level == "O2" else torch.float16
    assert network[0].inside == (dtype, dtype)
    assert probe.seen == [HALF]


def test_relu_of_a_third_at_o1() -> None:
    """The white list reaches ReLU, as MindSpore shows it: 0.33325195 handed on in float32."""
    probe = Probe()
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), probe)
    train_network = build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=0.1), level="O1"
    )
    network[0].weight.data.fill_(1.0)
    output = train_network.network(torch.full((1, 1), 1 / 3))
    assert f"{output.item():.8f}" == "0.33325195"
    assert output.dtype == torch.float32
    assert probe.seen == [ROUNDED]


MANAGERS = {
    "none": lambda: {"loss_scale_manager": None},
    "fixed_keep": lambda: {"loss_scale_manager": FixedLossScaleManager(64, False)},
    "fixed_drop": lambda: {"loss_scale_manager": FixedLossScaleManager(64, True)},
    "dynamic": lambda: {"loss_scale_manager": DynamicLossScaleManager()},
    "default": dict,
    "bad_type": lambda: {"loss_scale_manager": 3.0},
}
ERRORS = {"ValueError": ValueError, "TypeError": TypeError}
CPU_ERRORS = golden("cpu_errors")


@pytest.mark.parametrize("row", CPU_ERRORS, ids=lambda row: "-".join(map(str, row.values())))
def test_cpu_errors(row: dict[str, Any]) -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    arguments = MANAGERS[row["loss_scale_manager"]]()

    def build() -> Any:
        return build_train_network(
            network,
            optimizer,
            nn.CrossEntropyLoss(),
            level=row["level"],
            boost_level=row["boost_level"],
            **arguments,
        )

    if row["result"].startswith("ok:"):
        output = build()(torch.ones(3, 2), torch.tensor([0, 1, 0]))
        assert output.loss_scale.item() == (64 if "fixed" in row["loss_scale_manager"] else 1)
    else:
        with pytest.raises(ERRORS[row["result"]]):
            build()


@pytest.mark.parametrize("record", golden("loss_scale"), ids=lambda r: f"{r['init_loss_scale']:g}")
def test_loss_scale(record: dict[str, Any]) -> None:
    arguments = (record["init_loss_scale"], record["scale_factor"], record["scale_window"])
    manager, scaler = DynamicLossScaleManager(*arguments), DynamicLossScaler(*arguments)
    update, state = (
        DynamicLossScaleManager(*arguments).get_update_cell(),
        DynamicLossScale(*arguments),
    )
    by_cell = float(record["init_loss_scale"])
    for step, overflow in enumerate(record["overflow"]):
        manager.update_loss_scale(overflow)
        scaler.adjust(not overflow)
        state = state.adjust(not overflow)
        by_cell = update(by_cell, overflow)
        assert manager.get_loss_scale() == record["manager"][step]
        assert by_cell == record["update_cell"][step]
        assert scaler.scale_value == record["scaler"][step]
        assert state.value == record["scaler"][step]


@pytest.mark.parametrize(
    "record", golden("grad_freeze"), ids=lambda r: f"{r['groups']}-{r['strategy']}"
)
def test_freeze_schedule(record: dict[str, Any]) -> None:
    steps = record["total_steps"]
    ours = freeze_schedule(
        record["groups"], record["strategy"], record["freeze_p"], steps, record["np_random_seed"]
    )
    assert ours == record["indices"][:steps]


def centralized(record: dict[str, Any], name: str) -> Tensor:
    """Give the recorded weight after the step, had its gradient been centralised.

    The record is a plain step: after = before - lr * grad to the last bits, no mean of which is zero. MindSpore's
    centralisation had no effect there, against its documentation, which we follow.
    """
    before, gradient, after = (
        torch.tensor(record[f"{name}_{part}"]) for part in ("weight", "grad", "after")
    )
    torch.testing.assert_close(after, before - record["lr"] * gradient, rtol=0, atol=1e-6)
    return after + record["lr"] * gradient.flatten(1).mean(1).view(-1, *[1] * (gradient.dim() - 1))


@pytest.mark.parametrize("name", ["conv", "dense"])
def test_boost_level_o1_centralizes_the_recorded_gradient(name: str) -> None:
    record = golden("less_bn")["grad_centralization"]
    network = nn.Module()
    network.weight = nn.Parameter(torch.tensor(record[f"{name}_weight"]))
    network.forward = lambda factor: network.weight * factor
    train_network = build_train_network(
        network,
        torch.optim.SGD(network.parameters(), lr=record["lr"], momentum=0.9),
        lambda output, _: output.sum(),
        boost_level="O1",
    )
    train_network(torch.tensor(record[f"{name}_grad"]), None)
    torch.testing.assert_close(
        network.weight.detach(), centralized(record, name), rtol=0, atol=1e-6
    )
