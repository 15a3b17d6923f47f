"""A zoo of ordinary networks, each with a batch: what trains at O0 trains at every level or is refused by name."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = tuple[tuple[Any, ...], Any]
ZOO: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {}
REFUSED = {"linear_algebra": {"O2", "O3"}}
"""What this processor cannot compute in float16: refused, naming module and dtype."""


def animal(make: Callable[[], tuple[nn.Module, Batch]]) -> Callable[[], tuple[nn.Module, Batch]]:
    ZOO[make.__name__] = make
    return make


def labels(n: int = 8, classes: int = 3) -> Tensor:
    return torch.arange(n) % classes


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.register_buffer("position", torch.randn(1, 6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) + self.position[:, : tokens.shape[1]]).mean(1))


@animal
def positional_buffer():
    return Positional(), ((torch.randint(0, 11, (8, 6)),), labels())


class HandMadeRNN(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(5, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 7, device=x.device)
        c = torch.zeros(x.shape[0], 7, dtype=self.head.weight.dtype)
        outputs = torch.zeros(x.shape[0], x.shape[1], 7)
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
            outputs[:, t] = h
        return self.head(outputs.mean(1))


for _cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    ZOO[f"states_of_zeros_{_cell.__name__}"] = lambda cell=_cell: (
        HandMadeRNN(cell),
        ((torch.randn(8, 4, 5),), labels()),
    )


class Layers(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


for _layer in (nn.LSTM, nn.GRU, nn.RNN):
    ZOO[f"layer_{_layer.__name__}"] = lambda layer=_layer: (
        Layers(layer),
        ((torch.randn(8, 4, 5),), labels()),
    )


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.layer(packed)[1][-1])


@animal
def packed_sequence():
    return Packed(), ((torch.randn(8, 4, 5), torch.tensor([4, 3, 2, 1] * 2)), labels())


@animal
def weight_norm_parametrized():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)), ((torch.randn(8, 5),), labels())


@animal
def weight_norm_hook():
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)
            self.layer.weight_g = nn.Parameter(self.layer.weight.detach().norm(dim=1, keepdim=True))
            self.layer.weight_v = nn.Parameter(self.layer.weight.detach().clone())
            del self.layer.weight
            self.layer.register_forward_pre_hook(self._compute)
            self._compute(self.layer, ())
            self.head = nn.Linear(4, 3)

        @staticmethod
        def _compute(layer: nn.Module, _: Any) -> None:
            layer.weight = torch._weight_norm(layer.weight_v, layer.weight_g, 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).tanh())

    return Hooked(), ((torch.randn(8, 5),), labels())


@animal
def spectral_norm():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 3)), ((torch.randn(8, 5),), labels())


@animal
def spectral_norm_hook():
    layer = nn.utils.spectral_norm(nn.Conv2d(1, 4, 3))
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)), (
        (torch.randn(8, 1, 5, 5),),
        labels(),
    )


@animal
def sparse_embedding():
    network = nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    return network, ((torch.randint(0, 11, (8, 4)),), labels())


@animal
def embedding_with_max_norm():
    network = nn.Sequential(nn.Embedding(11, 6, max_norm=1.0), nn.Flatten(), nn.Linear(24, 3))
    return network, ((torch.randint(0, 11, (8, 4)),), labels())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 6)
        self.head = nn.Linear(6, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


@animal
def tied_embedding():
    return Tied(), ((torch.randint(0, 3, (8, 4)),), labels())


@animal
def shared_module():
    shared = nn.Linear(5, 5)
    return nn.Sequential(shared, nn.ReLU(), shared, nn.PReLU(), nn.Linear(5, 3)), (
        (torch.randn(8, 5),),
        labels(),
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, key_padding_mask=mask)
        return self.head(self.norm(x + attended).mean(1))


@animal
def multihead_attention():
    mask = torch.zeros(8, 5, dtype=torch.bool)
    mask[:, -1] = True
    return Attention(), ((torch.randn(8, 5, 8), mask), labels())


@animal
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(40, 3))
    return network, ((torch.randn(8, 5, 8),), labels())


class Masked(nn.Module):
    """Masks with large negative constants in all their spellings, one row hidden altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)
        self.register_buffer("causal", torch.triu(torch.full((5, 5), -1e9), 1))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / 8**0.5
        scores = scores.masked_fill(~keep[:, None, :], -1e9)
        scores = torch.where(keep[:, None, :], scores, -1e30)
        scores = scores + self.causal + (1.0 - keep[:, None, :].float()) * -1e4
        scores = torch.maximum(scores, torch.full_like(scores, torch.finfo(torch.float32).min))
        return self.head((scores.clamp(min=-1e9).softmax(-1) @ v).mean(1))


@animal
def large_negative_masks():
    keep = torch.ones(8, 5, dtype=torch.bool)
    keep[:, 3:] = False
    return Masked(), ((torch.randn(8, 5, 8), keep), labels())


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "frozen"


Named = namedtuple("Named", "x name")


@animal
def dict_batch():
    return OfDict(), (({"x": torch.randn(8, 5), "id": torch.arange(8)},), labels())


@animal
def dataclass_batch():
    return OfDict(), ((Frozen(torch.randn(8, 5)),), labels())


@animal
def namedtuple_batch():
    return OfDict(), ((Named(torch.randn(8, 5), "x"),), labels())


class Float64Input(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(((x - x.mean()) / x.std()).float())


@animal
def float64_input():
    return Float64Input(), ((torch.randn(8, 5, dtype=torch.float64),), labels())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad.mm(weight), grad.t().mm(x)


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.first(x), self.weight)


@animal
def autograd_function():
    return WithFunction(), ((torch.randn(8, 5),), labels())


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.fft(x).real)


@animal
def fourier():
    return Fourier(), ((torch.randn(8, 8),), labels())


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.matrix = nn.Parameter(torch.eye(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.linalg.solve(self.matrix, self.first(x).t()).t())


@animal
def linear_algebra():
    return Solver(), ((torch.randn(8, 5),), labels())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = torch.complex(x, torch.zeros_like(x)) @ self.weight
        return self.head(z.abs() + z.real + torch.view_as_real(z * x)[..., 1])


@animal
def complex():
    return Complex(), ((torch.randn(8, 5),), labels())


@animal
def batch_norm_net():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 3),
    )  # fmt: skip
    return network, ((torch.randn(8, 1, 8, 8),), labels())


@animal
def transposed_and_3d():
    network = nn.Sequential(
        nn.ConvTranspose2d(1, 2, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Unflatten(1, (1, 2)),
        nn.Conv3d(1, 2, 2), nn.SiLU(), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    network(torch.randn(8, 1, 4, 4))
    return network, ((torch.randn(8, 1, 4, 4),), labels())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(5, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.block(x), use_reentrant=self.use_reentrant))


@animal
def checkpoint_reentrant():
    return Checkpointed(True), ((torch.randn(8, 5),), labels())


@animal
def checkpoint_saved():
    return Checkpointed(False), ((torch.randn(8, 5),), labels())


class GradientPenalty(nn.Module):
    """Double backward inside the forward, and hooks on an activation and on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.body[0].weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.body(x)
        out.register_hook(lambda grad: grad * self.body[2].bias.abs().sum().detach().clamp(min=1.0))
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + gradient.square().sum(1, keepdim=True)


@animal
def double_backward_and_hooks():
    return GradientPenalty(), ((torch.randn(8, 5),), labels())


class Statistics(nn.Module):
    """Writes to buffers and a parameter in every way: in place, by item, out=, by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("memory", torch.zeros(4, 5))
        self.register_buffer("scratch", torch.zeros(5))
        self.register_buffer("last", torch.zeros(5))
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.memory[0] = x[0]
            self.memory[1:3].copy_(x[1:3])
            torch.add(self.mean, x[0], out=self.scratch)
            self.last = x[-1].detach()
            self.count += 1
        return self.head(x - self.mean)


@animal
def written_buffers():
    return Statistics(), ((torch.randn(8, 5),), labels())


@animal
def einsum_and_friends():
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4) / 2)
            self.bilinear = nn.Bilinear(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            a = torch.einsum("bi,ij->bj", x, self.weight)
            b = (
                torch.tensordot(x, self.weight, dims=1)
                + x @ self.weight
                + torch.addmm(a, x, self.weight)
            )
            c = torch.baddbmm(b[:, None], x[:, None], self.weight.expand(8, 5, 4))[:, 0]
            return self.bilinear(F.gelu(a), F.softplus(c)) + torch.outer(
                x[:, 0], self.weight[0, :3]
            )

    return Products(), ((torch.randn(8, 5),), labels())
