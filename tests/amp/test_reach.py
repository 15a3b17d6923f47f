"""Which operators a level reaches, in every spelling, as seen below autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.amp import auto_mixed_precision
from tests.amp.seen import Operands

HALF, WIDE = torch.float16, torch.float32


class Apply(nn.Module):
    """A network of one function of (x, w), both (4, 4)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.v = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w, self.v)


def seen(network: nn.Module, *inputs: Any, level: str = "O1") -> tuple[Operands, Any]:
    cast = auto_mixed_precision(network, level)
    with torch.no_grad(), Operands() as operands:
        output = cast(*inputs)
    return operands, output


MATRIX = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "addr", "addbmm")
LOW: dict[str, Callable[..., Any]] = {
    "F.linear": lambda x, w, v: F.linear(x, w, v),
    "torch.mm": lambda x, w, v: torch.mm(x, w),
    "x.mm": lambda x, w, v: x.mm(w),
    "x @ w": lambda x, w, v: x @ w,
    "x.matmul": lambda x, w, v: x.matmul(w),
    "torch.matmul": lambda x, w, v: torch.matmul(x, w),
    "x.__rmatmul__": lambda x, w, v: x.__rmatmul__(w),
    "torch.linalg.matmul": lambda x, w, v: torch.linalg.matmul(x, w),
    "torch.mv": lambda x, w, v: torch.mv(x, v),
    "torch.addmm": lambda x, w, v: torch.addmm(v, x, w),
    "x.addmm": lambda x, w, v: x.addmm(x, w),
    "torch.addmv": lambda x, w, v: torch.addmv(v, x, v),
    "torch.bmm": lambda x, w, v: torch.bmm(x[None], w[None]),
    "torch.baddbmm": lambda x, w, v: torch.baddbmm(x[None], x[None], w[None]),
    "torch.addbmm": lambda x, w, v: torch.addbmm(x, x[None], w[None]),
    "torch.einsum": lambda x, w, v: torch.einsum("ij,jk->ik", x, w),
    "torch.tensordot": lambda x, w, v: torch.tensordot(x, w, dims=1),
    "torch.inner": lambda x, w, v: torch.inner(x, w),
    "torch.dot": lambda x, w, v: torch.dot(x[0], v),
    "torch.chain_matmul": lambda x, w, v: torch.linalg.multi_dot([x, w, w]),
    "torch.ops.aten.mm": lambda x, w, v: torch.ops.aten.mm.default(x, w),
    "mm(mat2=)": lambda x, w, v: torch.mm(input=x, mat2=w),
}
OTHER_LOW: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "F.relu": (lambda x, w, v: F.relu(x), ("relu", "relu_")),
    "torch.relu": (lambda x, w, v: torch.relu(x), ("relu", "relu_")),
    "x.relu()": (lambda x, w, v: x.relu(), ("relu", "relu_")),
    "x.relu_()": (lambda x, w, v: x.clone().relu_(), ("relu", "relu_")),
    "F.relu(inplace)": (lambda x, w, v: F.relu(x.clone(), inplace=True), ("relu", "relu_")),
    "F.prelu": (lambda x, w, v: F.prelu(x, v), ("_prelu_kernel",)),
    "torch.prelu": (lambda x, w, v: torch.prelu(x, v), ("_prelu_kernel",)),
    "torch.outer": (lambda x, w, v: torch.outer(x[0], v), ("mul", "outer")),
    "torch.ger": (lambda x, w, v: torch.ger(x[0], v), ("mul", "ger")),
    "x.outer": (lambda x, w, v: x[0].outer(v), ("mul", "outer")),
    "torch.addr": (lambda x, w, v: torch.addr(x, x[0], v), ("addr", "mul")),
    "F.conv1d": (lambda x, w, v: F.conv1d(x[None], w[:, :, None], v), ("convolution",)),
    "F.conv2d": (lambda x, w, v: F.conv2d(x[None, None], w[None, None]), ("convolution",)),
    "F.conv3d": (lambda x, w, v: F.conv3d(x[None, None, None], w[None, None, None]), ("convolution",)),
    "conv2d(padding=same)": (
        lambda x, w, v: torch.conv2d(x[None, None], w[None, None, :3, :3], padding="same"), ("convolution",),
    ),
    "F.conv_transpose2d": (
        lambda x, w, v: F.conv_transpose2d(x[None, None], w[None, None]), ("convolution",),
    ),
    "F.bilinear": (lambda x, w, v: F.bilinear(x, x, w[None]), ("_trilinear", "bmm", "mul")),
    "F.scaled_dot_product_attention": (
        lambda x, w, v: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
        ("_scaled_dot_product_flash_attention_for_cpu", "bmm"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LOW, *OTHER_LOW])
def test_white_list_in_every_spelling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands float16 at O1, the output handed on in float32, rounded to float16."""
    function, operators = OTHER_LOW[name] if name in OTHER_LOW else (LOW[name], MATRIX)
    with monkeypatch.context() as patch:  # without the CPU's float32 accumulation, to see the casts
        patch.setattr("ampexp.amp.network.why_not_native", lambda *_: None)
        operands, output = seen(Apply(function), torch.randn(4, 4))
    assert operands.of(*operators) == {HALF}
    assert output.dtype == WIDE
    assert torch.equal(output.half().float(), output)
    x = torch.randn(4, 4)
    network = Apply(function)
    exact = auto_mixed_precision(network, "O1")(x)
    rounded = function(*(t.detach().half().float() for t in (x, network.w, network.v)))
    torch.testing.assert_close(exact, rounded.half().float(), rtol=2e-3, atol=2e-3)
    assert not torch.equal(exact, function(x, network.w, network.v))


FLOAT32: dict[str, Callable[..., Any]] = {
    "gelu": lambda x, w, v: F.gelu(x),
    "softmax": lambda x, w, v: x.softmax(-1),
    "add": lambda x, w, v: x + w,
    "mul": lambda x, w, v: x * w,
    "sum": lambda x, w, v: x.sum(0),
    "tanh": lambda x, w, v: torch.tanh(x),
    "layer_norm": lambda x, w, v: F.layer_norm(x, (4,), v),
    "batch_norm": lambda x, w, v: F.batch_norm(x, None, None, v, training=True),
    "leaky_relu": lambda x, w, v: F.leaky_relu(x),
    "hardtanh": lambda x, w, v: F.hardtanh(x),
    "max_pool2d": lambda x, w, v: F.max_pool2d(x[None, None], 2),
    "cross_entropy": lambda x, w, v: F.cross_entropy(x, torch.arange(4)),
    "norm": lambda x, w, v: x.norm(),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_everything_else_is_float32_at_o1(name: str) -> None:
    function = FLOAT32[name]
    x, network = torch.randn(4, 4), Apply(function)
    operands, output = seen(network, x)
    assert operands.of() == {WIDE}
    assert torch.equal(output, function(x, network.w, network.v))


@pytest.mark.parametrize("name", [*LOW, *OTHER_LOW, *FLOAT32])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_every_floating_operand_is_low_at_o2_and_o3(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's float32 accumulation is switched off here, so that what the casts give is seen."""
    monkeypatch.setattr("ampexp.amp.network.why_not_native", lambda *_: None)
    function = {**LOW, **FLOAT32, **{key: pair[0] for key, pair in OTHER_LOW.items()}}[name]
    operands, output = seen(Apply(function), torch.randn(4, 4), level=level)
    assert operands.of() == {HALF}
    assert output.dtype == WIDE


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_float32_at_o1(kind: type[nn.Module]) -> None:
    x, layer = torch.randn(2, 3, 4), kind(4, 5)
    _, (output, _) = seen(layer, x)
    with torch.no_grad():
        assert torch.equal(output, layer(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_go_low_at_o1(kind: type[nn.Module]) -> None:
    x, cell = torch.randn(2, 4), kind(4, 5)
    _, output = seen(cell, x)
    plain = cell(x)
    low, wide = (o[0] if isinstance(o, tuple) else o for o in (output, plain))
    assert low.dtype == WIDE
    assert torch.equal(low.half().float(), low)
    assert not torch.equal(low, wide)
    torch.testing.assert_close(low, wide, rtol=1e-2, atol=1e-2)


def test_products_inside_multihead_attention_go_low_at_o1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampexp.amp.network.why_not_native", lambda *_: None)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train()
    x = torch.randn(2, 3, 8)
    operands, (output, _) = seen(attention, x, x, x)
    assert operands.of("mm", "addmm", "bmm", "baddbmm") == {HALF}
    assert operands.of("_softmax", "softmax") == {WIDE}
    assert output.dtype == WIDE


def test_norms_stay_float32_inside_a_low_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampexp.amp.network.why_not_native", lambda *_: None)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.LayerNorm(2), nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    x = torch.randn(3, 1, 4, 4)
    operands, _ = seen(network, x, level="O2")
    assert operands.of("native_batch_norm", "native_layer_norm", "_native_batch_norm_legit") >= {
        WIDE
    }
    assert operands.of("native_layer_norm") == {WIDE}
    assert operands.of("convolution", "gelu", "addmm", "native_group_norm") == {HALF}
    operands, _ = seen(network, x, level="O3")
    assert operands.of("native_layer_norm", "native_group_norm") == {HALF}


class OwnNorm(nn.LayerNorm):
    """A norm with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        self.dtype_inside = (centred * 1.0).dtype
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


@pytest.mark.parametrize("root", [True, False])
def test_subclasses_of_norms_are_kept_also_as_the_root(root: bool) -> None:
    norm = OwnNorm(4)
    network = norm if root else nn.Sequential(norm, nn.Identity())
    x = torch.randn(3, 4)
    output = auto_mixed_precision(network, "O2")(x)
    assert norm.dtype_inside == WIDE
    expected = norm(x.half().float()).half().float()
    assert torch.equal(output, expected)
    auto_mixed_precision(network, "O3")(x)
    assert norm.dtype_inside == HALF


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.InstanceNorm1d, nn.SyncBatchNorm])
def test_other_norms_follow_the_network(kind: type[nn.Module]) -> None:
    norm = (nn.GroupNorm(2, 4) if kind is nn.GroupNorm else kind(4)).eval()
    inside: list[torch.dtype] = []
    norm.register_forward_pre_hook(lambda _, args: inside.append(args[0].sin().dtype))
    auto_mixed_precision(nn.Sequential(norm), "O2").eval()(torch.randn(3, 4, 5))
    assert inside == [HALF]
