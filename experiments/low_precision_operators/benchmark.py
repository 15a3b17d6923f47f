"""Which operators of real networks PyTorch computes slowly in float16 and bfloat16 on this processor.

    python experiments/low_precision_operators/benchmark.py [--rounds 15] [--threads 1 2] [--kernels] [--results FILE]

Each operator runs forward and backward in float32 and in both low formats, in random order within a round, in one
process; a figure is the ratio of medians to float32. With --kernels the low formats run through ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ampexp.amp.cast import CastMode
from ampexp.amp.policy import whole_network
from ampexp.kernels.accumulate import Accumulation

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IMAGES, TOKENS = (64, 16, 32, 32), (4096, 512)

Operator = tuple[Callable[..., Tensor], list[tuple[int, ...]]]


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _rnn(kind: str) -> Callable[..., Tensor]:
    function = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_tanh}[kind]

    def run(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
        state = (h, h) if kind == "lstm" else h
        return function(x, state, weights, True, 1, 0.0, True, False, True)[0]

    return run


def _gates(number: int, width: int) -> list[tuple[int, ...]]:
    return [(32, 32, width), (1, 32, width), (number * width, width), (number * width, width),
            (number * width,), (number * width,)]  # fmt: skip


OPERATORS: dict[str, Operator] = {
    # matrices
    "mm": (torch.mm, [(512, 512), (512, 512)]),
    "addmm": (torch.addmm, [(512,), (512, 512), (512, 512)]),
    "linear": (F.linear, [(1024, 256), (256, 256), (256,)]),
    "bmm": (torch.bmm, [(16, 128, 64), (16, 64, 128)]),
    "baddbmm": (torch.baddbmm, [(16, 128, 128), (16, 128, 64), (16, 64, 128)]),
    "addbmm": (torch.addbmm, [(128, 128), (16, 128, 64), (16, 64, 128)]),
    "matmul": (torch.matmul, [(16, 128, 64), (64, 128)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(16, 128, 64), (16, 128, 64)]),
    "mv": (torch.mv, [(1024, 1024), (1024,)]),
    "dot": (torch.dot, [(262144,), (262144,)]),
    "ger": (torch.outer, [(1024,), (1024,)]),
    "addr": (torch.addr, [(1024, 1024), (1024,), (1024,)]),
    "bilinear": (F.bilinear, [(64, 32), (64, 32), (32, 32, 32)]),
    "cdist": (torch.cdist, [(256, 32), (256, 32)]),
    # convolutions
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [(16, 32, 256), (32, 32, 3)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [(16, 16, 32, 32), (16, 16, 3, 3)]),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=16), [(16, 16, 32, 32), (16, 1, 3, 3)]),
    "conv2d dilated": (lambda x, w: F.conv2d(x, w, dilation=2), [(16, 16, 32, 32), (16, 16, 3, 3)]),
    "conv3d": (F.conv3d, [(4, 8, 12, 12, 12), (8, 8, 3, 3, 3)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(16, 16, 16, 16), (16, 16, 2, 2)]),
    "unfold": (lambda x: F.unfold(x, 3), [(16, 16, 32, 32)]),
    # attention and recurrent layers
    "attention": (F.scaled_dot_product_attention, [(8, 4, 128, 32)] * 3),
    "attention causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(8, 4, 128, 32)] * 3),
    "lstm": (_rnn("lstm"), _gates(4, 64)),
    "gru": (_rnn("gru"), _gates(3, 64)),
    "rnn": (_rnn("rnn"), _gates(1, 64)),
    # lookups
    "embedding": (lambda w: F.embedding(torch.arange(4096) % 1000, w), [(1000, 128)]),
    "embedding_bag": (lambda w: F.embedding_bag((torch.arange(4096) % 1000).view(-1, 8), w), [(1000, 128)]),
    "gather": (lambda x: x.gather(0, torch.arange(4096).view(-1, 1).expand(-1, 512) % 4096), [TOKENS]),
    "index_select": (lambda x: x.index_select(0, torch.arange(2048)), [TOKENS]),
    "index": (lambda x: x[torch.arange(2048)], [TOKENS]),
    # normalisations
    "batch_norm": (_norm, [IMAGES, (16,), (16,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (512,), w, b), [TOKENS, (512,), (512,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [IMAGES, (16,), (16,)]),
    "instance_norm": (lambda x: F.instance_norm(x), [IMAGES]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (512,), w), [TOKENS, (512,)]),
    "normalize": (lambda x: F.normalize(x), [TOKENS]),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), [IMAGES]),
    # pooling and sampling
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), [(64, 16, 1024)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [IMAGES]),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), [(8, 8, 16, 16, 16)]),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), [(64, 16, 1024)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [IMAGES]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), [(8, 8, 16, 16, 16)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 4), [IMAGES]),
    "adaptive_avg_pool2d to 1": (lambda x: F.adaptive_avg_pool2d(x, 1), [IMAGES]),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), [IMAGES]),
    "upsample nearest": (lambda x: F.interpolate(x, scale_factor=2), [(16, 16, 32, 32)]),
    "upsample bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(16, 16, 32, 32)]),
    "upsample bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), [(16, 16, 32, 32)]),
    "grid_sample": (F.grid_sample, [(16, 16, 32, 32), (16, 32, 32, 2)]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [IMAGES]),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1)), [IMAGES]),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [IMAGES]),
    "pad replicate": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), [IMAGES]),
    # activations
    **{
        name: (getattr(F, name), [TOKENS])
        for name in ("relu", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "relu6", "hardtanh",
                     "hardswish", "hardsigmoid", "softplus", "softsign", "tanhshrink", "hardshrink", "softshrink",
                     "logsigmoid", "glu")
    },
    **{
        name: (getattr(torch, name), [TOKENS])
        for name in ("sigmoid", "tanh", "exp", "abs", "sin", "cos", "erf", "square", "neg", "log1p", "expm1")
    },
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), [TOKENS]),
    "prelu": (F.prelu, [IMAGES, (16,)]),
    "softmax": (lambda x: F.softmax(x, -1), [TOKENS]),
    "softmax first axis": (lambda x: F.softmax(x, 0), [TOKENS]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [TOKENS]),
    "dropout": (lambda x: F.dropout(x, 0.1), [TOKENS]),
    # elementwise and reductions
    "add": (torch.add, [TOKENS, TOKENS]),
    "add twice": (lambda x: x + x.relu(), [TOKENS]),
    "add bias": (torch.add, [TOKENS, (512,)]),
    "add channels": (torch.add, [IMAGES, (16, 1, 1)]),
    "sub": (torch.sub, [TOKENS, TOKENS]),
    "mul": (torch.mul, [TOKENS, TOKENS]),
    "mul scalar": (lambda x: x * 0.5, [TOKENS]),
    "mul channels": (torch.mul, [IMAGES, (16, 1, 1)]),
    "div": (lambda a, b: a / (b.abs() + 1), [TOKENS, TOKENS]),
    "pow": (lambda x: x**3, [TOKENS]),
    "sqrt": (lambda x: (x.abs() + 1).sqrt(), [TOKENS]),
    "rsqrt": (lambda x: (x.abs() + 1).rsqrt(), [TOKENS]),
    "log": (lambda x: (x.abs() + 1).log(), [TOKENS]),
    "maximum": (torch.maximum, [TOKENS, TOKENS]),
    "clamp": (lambda x: x.clamp(-1, 1), [TOKENS]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [TOKENS, TOKENS]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), [TOKENS]),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), [TOKENS, TOKENS]),
    "addcmul": (torch.addcmul, [TOKENS, TOKENS, TOKENS]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [TOKENS, TOKENS]),
    "stack": (lambda a, b: torch.stack([a, b]), [TOKENS, TOKENS]),
    "chunk": (lambda x: torch.add(*x.chunk(2, 1)), [TOKENS]),
    "transpose": (lambda x: x.t().contiguous(), [TOKENS]),
    "roll": (lambda x: x.roll(1, 0), [TOKENS]),
    "repeat": (lambda x: x.repeat(1, 2), [TOKENS]),
    "tril": (torch.tril, [TOKENS]),
    "sum": (torch.sum, [TOKENS]),
    "sum first axis": (lambda x: x.sum(0), [TOKENS]),
    "sum last axis": (lambda x: x.sum(-1), [TOKENS]),
    "mean": (lambda x: x.mean((2, 3)), [IMAGES]),
    "var": (lambda x: x.var(-1), [TOKENS]),
    "norm": (lambda x: x.norm(dim=-1), [TOKENS]),
    "amax": (lambda x: x.amax(-1), [TOKENS]),
    "max": (lambda x: x.max(-1)[0], [TOKENS]),
    "cumsum": (lambda x: x.cumsum(-1), [TOKENS]),
    "cumprod": (lambda x: x.cumprod(-1), [(64, 512)]),
    "logsumexp": (lambda x: x.logsumexp(-1), [TOKENS]),
    "prod": (lambda x: x.prod(-1), [TOKENS]),
    "sort": (lambda x: x.sort(-1)[0], [(512, 512)]),
    "topk": (lambda x: x.topk(5)[0], [TOKENS]),
    "scatter_add": (
        lambda x: torch.zeros_like(x).scatter_add(0, torch.arange(4096).view(-1, 1).expand(-1, 512) % 64, x), [TOKENS]),
    "index_add": (lambda x: torch.zeros_like(x).index_add(0, torch.arange(4096) % 64, x), [TOKENS]),
    # losses
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(4096) % 512), [TOKENS]),
    "cross_entropy smoothed": (lambda x: F.cross_entropy(x, torch.arange(4096) % 512, label_smoothing=0.1), [TOKENS]),
    "nll_loss 2d": (lambda x: F.nll_loss(x, torch.zeros(64, 32, 32, dtype=torch.long)), [IMAGES]),
    "mse_loss": (F.mse_loss, [TOKENS, TOKENS]),
    "l1_loss": (F.l1_loss, [TOKENS, TOKENS]),
    "smooth_l1_loss": (F.smooth_l1_loss, [TOKENS, TOKENS]),
    "huber_loss": (F.huber_loss, [TOKENS, TOKENS]),
    "bce with logits": (lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.5)), [TOKENS]),
    "kl_div": (lambda x: F.kl_div(x, torch.full_like(x, 0.5), reduction="batchmean"), [TOKENS]),
}  # fmt: skip
"""Each operator of a network with the shapes of its floating operands."""


def step(operator: Operator, dtype: torch.dtype, kernels: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Give the forward and the backward of an operator: the second uses what the first left."""
    function, shapes = operator
    accumulation = Accumulation()
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    left: list[Tensor] = []
    gradients: dict[torch.Size, Tensor] = {}

    is_low = kernels and dtype is not torch.float32
    mode = CastMode(whole_network(dtype, keep_batchnorm_fp32=False), torch.nn.Identity(), accumulation)

    def forward() -> None:
        if is_low:
            with mode:
                left[:] = [function(*operands)]
        else:
            left[:] = [function(*operands)]

    def backward() -> None:
        result = left.pop()
        if result.shape not in gradients:
            gradients[result.shape] = torch.randn(result.shape, generator=generator).to(result.dtype)
        with accumulation.backward_scope() if is_low else nullcontext():
            torch.autograd.grad(result, operands, gradients[result.shape])

    return forward, backward


def measure(threads: int, rounds: int, kernels: bool, names: list[str]) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    table = {}
    for name in names:
        seconds: dict[tuple[str, str], list[float]] = {}
        parts = {word: step(OPERATORS[name], dtype, kernels) for word, dtype in DTYPES.items()}
        refused = {}
        for number in range(rounds + 2):
            for word in random.sample(list(parts), len(parts)):
                if word in refused:
                    continue
                try:
                    for way, act in zip(("forward", "backward"), parts[word], strict=True):
                        begin = time.perf_counter()
                        act()
                        if number >= 2:
                            seconds.setdefault((word, way), []).append(time.perf_counter() - begin)
                except RuntimeError as error:
                    refused[word] = str(error).splitlines()[0]
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        for word in DTYPES:
            if word not in refused:
                medians[word, "both"] = medians[word, "forward"] + medians[word, "backward"]
        row: dict[str, float] = {"float32_milliseconds": round(1e3 * medians["float32", "both"], 3)}
        for word in ("float16", "bfloat16"):
            for way in ("both", "forward", "backward"):
                if word in refused:
                    row[f"{word} {way}"] = refused[word]
                else:
                    row[f"{word} {way}"] = round(medians[word, way] / medians["float32", way], 2)
        table[name] = row
        print(f"{threads} {name:26s}", *(f"{value}" for value in row.values()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(OPERATORS), choices=list(OPERATORS))
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    random.seed(0)
    report = {
        "date": str(date.today()),
        "machine": {"processor": torch.cpu.get_capabilities()["cpu_name"], "cores": os.cpu_count(),
                    "kernels": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__},
        "rounds": args.rounds,
        "kernels": "ampexp" if args.kernels else "PyTorch",
        "threads": {str(n): measure(n, args.rounds, args.kernels, args.only) for n in args.threads},
    }  # fmt: skip
    if args.results:
        args.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
