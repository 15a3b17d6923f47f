"""Whole operators on low-precision tensors: widened, computed in float32, rounded once, forward and backward.

PyTorch's autograd would ask for each product apart, and a gradient would be widened for every product it enters. Here
an operator is one autograd function by a rule: between forward and backward only low-precision tensors are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten
Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Rule:
    """How an operator computes and differentiates.

    `compute(constants, *operands)` gives the rounded result, then what backward needs besides the operands.
    `differentiate(constants, needed, gradient, *operands, *rest)` gives float32 gradients; `gradient` is float32
    already. Of a `product`, the gradient of an operand does not depend on that operand.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    differentiate: Callable[..., Tensors]
    product: bool = False


class Application(NamedTuple):
    """A rule applied to the operands and the constants of a call."""

    rule: Rule
    constants: Any
    operands: Tensors


def run(application: Application) -> Tensor:
    """Compute, and leave autograd the function that differentiates where a gradient is wanted."""
    rule, constants, operands = application
    if torch.is_grad_enabled():
        for operand in operands:
            if operand is not None and operand.requires_grad:
                result: Tensor = _Rounded.apply(rule, constants, *operands)
                return result
    return rule.compute(constants, *operands)[0]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, constants: Any, *operands: Tensor | None) -> Tensor:
        result, *rest = rule.compute(constants, *operands)
        ctx.rule, ctx.constants, ctx.shapes = rule, constants, None
        if rule.product and not all(needed := ctx.needs_input_grad[2:]):
            ctx.shapes = [None if operand is None else operand.shape for operand in operands]
            operands = tuple(
                operand if any(needed[:index] + needed[index + 1 :]) else None
                for index, operand in enumerate(operands)
            )
        ctx.save_for_backward(*operands, *rest)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed, (gradient,) = ctx.needs_input_grad[2:], gradients
        rule, saved = ctx.rule, ctx.saved_tensors  # once: checkpoints compute them again
        operands, rest = saved[: len(needed)], saved[len(needed) :]
        with torch._C.DisableTorchFunction():  # the level has cast already
            if torch.is_grad_enabled():
                return None, None, *_by_autograd(ctx, needed, gradient, operands)
            found = rule.differentiate(ctx.constants, needed, gradient.float(), *operands, *rest)
            return None, None, *(None if x is None else x.to(gradient.dtype) for x in found)


def _by_autograd(ctx: Any, needed: Any, gradient: Tensor, operands: Tensors) -> Tensors:
    """Compute again and differentiate by PyTorch's own operators, so that the gradient has a graph of its own."""
    filled = list(operands)
    if ctx.shapes is not None:  # operands of a product that no wanted gradient depends on
        for index, shape in enumerate(ctx.shapes):
            if operands[index] is None and shape is not None:
                filled[index] = gradient.new_zeros(shape).requires_grad_(needed[index])
    result = ctx.rule.compute(ctx.constants, *map(_wide, filled))[0].to(gradient.dtype)
    wanted = [operand for operand, need in zip(filled, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))  # type: ignore[arg-type]
    return tuple(next(found) if need else None for need in needed)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


# linear: y = x w^T + b, x (..., in), w (out, in); constants: whether x lies column by column and
# w row by row, by which PyTorch chooses how to differentiate


def _linear(_: Any, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor]:
    return (F.linear(x.float(), w.float(), _wide(b)).to(x.dtype),)


def _linear_gradients(
    layout: Any, needed: tuple[bool, ...], gradient: Tensor, x: Any, w: Any, b: Any
) -> Tensors:
    x_by_columns, w_by_rows = layout
    of_x = of_w = None
    rows = _rows(gradient)
    if needed[0]:
        w = w.float()
        of_x = torch.mm(w.t(), rows.t()).t() if x_by_columns else torch.mm(rows, w)
        of_x = of_x if rows is gradient else of_x.view(*gradient.shape[:-1], w.shape[1])
    if needed[1]:
        x = _rows(x).float()
        of_w = torch.mm(rows.t(), x) if w_by_rows else torch.mm(x.t(), rows).t()
    return of_x, of_w, rows.sum(0) if needed[2] else None


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# matmul: a (..., n, k), b (..., k, m) with the same batch axes, or b (k, m); constants as of linear, or None for stacks


def _matmul(_: Any, a: Tensor, b: Tensor) -> tuple[Tensor]:
    return (torch.matmul(a.float(), b.float()).to(a.dtype),)


def _matmul_gradients(
    layout: Any, needed: tuple[bool, ...], gradient: Tensor, a: Any, b: Any
) -> Tensors:
    if layout is not None:  # b (k, m) is a layer's w^T
        of_a, of_b, _ = _linear_gradients(
            layout, (*needed, False), gradient, a, None if b is None else b.t(), None
        )
        return of_a, None if of_b is None else of_b.t()
    return (
        torch.matmul(gradient, b.float().mT) if needed[0] else None,
        torch.matmul(a.float().mT, gradient) if needed[1] else None,
    )


def _by_columns(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


# convolution; constants: stride, padding, dilation, transposed, output_padding, groups


def _convolution(constants: Any, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor]:
    result: Tensor = _aten.convolution.default(x.float(), w.float(), _wide(b), *constants)
    return (result.to(x.dtype),)


def _convolution_gradients(
    constants: Any,
    needed: tuple[bool, ...],
    gradient: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
) -> Tensors:
    sizes = None if b is None else list(b.shape)
    found: Tensors = _aten.convolution_backward.default(
        gradient, x.float(), w.float(), sizes, *constants, list(needed)
    )
    return found


# attention by PyTorch's flash kernel; constants: whether causal, scale


def _attention(constants: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    causal, scale = constants
    result, log_sum_exp = _aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.float(), k.float(), v.float(), 0.0, causal, scale=scale
    )
    result = result.to(q.dtype)
    return result, result, log_sum_exp


def _attention_gradients(
    constants: Any,
    needed: Any,
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
) -> Tensors:
    causal, scale = constants
    found: Tensors = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        gradient, q.float(), k.float(), v.float(), result.float(), lse, 0.0, causal, scale=scale
    )
    return found


# embedding: rows of a table; constants: indices, padding_idx, scale_grad_by_freq


def _embedding(constants: Any, table: Tensor) -> tuple[Tensor]:
    return (_aten.embedding.default(table, *constants),)


def _embedding_gradients(constants: Any, _: Any, gradient: Tensor, table: Tensor) -> Tensors:
    indices, padding_idx, scale = constants
    return (
        _aten.embedding_dense_backward.default(
            gradient, indices, table.shape[0], padding_idx, scale
        ),
    )


# group normalisation; constants: the sizes (N, C, axes), groups, eps


def _group_norm(constants: Any, x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
    *sizes, groups, eps = constants
    result, mean, rstd = _aten.native_group_norm.default(
        x.float(), _wide(w), _wide(b), *sizes, groups, eps
    )
    return result.to(x.dtype), mean, rstd


def _group_norm_gradients(
    constants: Any, needed: Any, gradient: Tensor, x: Tensor, w: Any, b: Any, mean: Tensor, rstd: Tensor
) -> Tensors:
    *sizes, groups, _ = constants
    found: Tensors = _aten.native_group_norm_backward.default(
        gradient.contiguous(), x.float(), mean, rstd, _wide(w), *sizes, groups, list(needed)
    )
    return found


# unfold: the patches of an image; constants: kernel size, dilation, padding, stride, then the image's size


def _unfold(constants: Any, x: Tensor) -> tuple[Tensor]:
    *steps, _ = constants
    return (_aten.im2col.default(x, *steps),)


def _unfold_gradients(constants: Any, _: Any, gradient: Tensor, x: Tensor) -> Tensors:
    *steps, size = constants
    return (_aten.col2im.default(gradient, size, *steps),)


# power; constants: the exponent


def _power(exponent: Any, x: Tensor) -> tuple[Tensor]:
    return (x.float().pow(exponent).to(x.dtype),)


def _power_gradients(exponent: Any, _: Any, gradient: Tensor, x: Tensor) -> Tensors:
    if exponent == 0:
        return (torch.zeros_like(gradient),)
    return (gradient * (exponent * x.float().pow(exponent - 1)),)


# Huber loss; constants: reduction, delta


def _huber_loss(constants: Any, x: Tensor, target: Tensor) -> tuple[Tensor]:
    return (_aten.huber_loss.default(x.float(), target.float(), *constants).to(x.dtype),)


def _huber_loss_gradients(
    constants: Any, needed: Any, gradient: Tensor, x: Tensor, target: Tensor
) -> Tensors:
    x, target = x.float(), target.float()
    pairs = ((x, target), (target, x))
    return tuple(
        _aten.huber_loss_backward.default(gradient, *pair, *constants) if need else None
        for pair, need in zip(pairs, needed, strict=True)
    )


# sampling of images at the points of a grid; constants: interpolation, padding, whether corners align


def _grid_sample(constants: Any, x: Tensor, grid: Tensor) -> tuple[Tensor]:
    return (_aten.grid_sampler_2d.default(x.float(), grid.float(), *constants).to(x.dtype),)


def _grid_sample_gradients(
    constants: Any, needed: Any, gradient: Tensor, x: Tensor, grid: Tensor
) -> Tensors:
    found: Tensors = _aten.grid_sampler_2d_backward.default(
        gradient, x.float(), grid.float(), *constants, [needed[0], True]
    )
    return found[0] if needed[0] else None, found[1] if needed[1] else None


LINEAR = Rule(_linear, _linear_gradients, product=True)
MATMUL = Rule(_matmul, _matmul_gradients, product=True)
CONVOLUTION = Rule(_convolution, _convolution_gradients)
ATTENTION = Rule(_attention, _attention_gradients)
EMBEDDING = Rule(_embedding, _embedding_gradients)
GROUP_NORM = Rule(_group_norm, _group_norm_gradients)
UNFOLD = Rule(_unfold, _unfold_gradients)
POWER = Rule(_power, _power_gradients)
HUBER_LOSS = Rule(_huber_loss, _huber_loss_gradients)
GRID_SAMPLE = Rule(_grid_sample, _grid_sample_gradients)


# from the arguments of a call to a rule, or None where no rule takes them


def of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Application | None:
    """Take any F.linear with a matrix of weights."""
    if weight.dim() != 2 or input.dim() < 2:
        return None
    layout = (_by_columns(input), weight.stride(1) == 1 and weight.stride(0) == weight.shape[1])
    return Application(LINEAR, layout, (input, weight, bias))


def of_matmul(input: Tensor, other: Tensor) -> Application | None:
    """Take products of matrices, of stacks of matrices with a matrix, and of stacks of the same shape."""
    if min(input.dim(), other.dim()) < 2 or not (
        other.dim() == 2 or input.shape[:-2] == other.shape[:-2]
    ):
        return None
    layout = None
    if other.dim() == 2:
        layout = (_by_columns(input), _by_columns(other))
    return Application(MATMUL, layout, (input, other))


def of_bmm(input: Tensor, mat2: Tensor) -> Application | None:
    """Take a batch of products."""
    return of_matmul(input, mat2) if input.dim() == mat2.dim() == 3 else None


def of_mm(input: Tensor, mat2: Tensor) -> Application | None:
    """Take a product of two matrices."""
    return of_matmul(input, mat2) if input.dim() == mat2.dim() == 2 else None


def _of_convolution(
    axes: int, input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Application | None:  # fmt: skip
    if input.dim() != axes + 2 or isinstance(padding, str):
        return None
    constants = (*(_each(x, axes) for x in (stride, padding, dilation)), False, [0] * axes, groups)
    return Application(CONVOLUTION, constants, (input, weight, bias))


def _of_transposed(
    axes: int, input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Application | None:  # fmt: skip
    if input.dim() != axes + 2:
        return None
    steps = (_each(x, axes) for x in (stride, padding, dilation))
    return Application(
        CONVOLUTION, (*steps, True, _each(output_padding, axes), groups), (input, weight, bias)
    )


def _each(value: Any, axes: int) -> list[int]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    return values * axes if len(values) == 1 else values


def of_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Application | None:  # fmt: skip
    """Take what PyTorch gives to its flash kernel, without mask and dropout."""
    if attn_mask is not None or dropout_p or enable_gqa:
        return None
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    if torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale) != flash:
        return None
    return Application(ATTENTION, (is_causal, scale), (query, key, value))


def of_embedding(
    weight: Tensor, input: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Application | None:  # fmt: skip
    """Take lookups with a dense gradient."""
    if sparse:
        return None
    return Application(EMBEDDING, (input, padding_idx, scale_grad_by_freq), (weight,))


def of_group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Application | None:  # fmt: skip
    """Take contiguous inputs of the right number of channels."""
    if input.dim() < 2 or input.numel() == 0 or input.shape[1] % num_groups:
        return None
    if not input.is_contiguous():
        return None
    sizes = (input.shape[0], input.shape[1], math.prod(input.shape[2:]))
    return Application(GROUP_NORM, (*sizes, num_groups, eps), (input, weight, bias))


def of_unfold(
    input: Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Application | None:
    """Take batches of images."""
    if input.dim() != 4:
        return None
    steps = (_each(value, 2) for value in (kernel_size, dilation, padding, stride))
    return Application(UNFOLD, (*steps, list(input.shape[-2:])), (input,))


def of_power(input: Tensor, exponent: Any = 2) -> Application | None:
    """Take exponents that are numbers; a square is the second power."""
    return Application(POWER, exponent, (input,)) if type(exponent) in (int, float) else None


def of_huber_loss(
    input: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0
) -> Application | None:
    """Take operands of one shape."""
    if input.shape != target.shape:
        return None
    return Application(HUBER_LOSS, (reduction, delta), (input, target))


def of_grid_sample(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Application | None:
    """Take two-dimensional images."""
    if input.dim() != 4 or grid.dim() != 4 or input.numel() == 0:
        return None
    constants = (interpolation_mode, padding_mode, align_corners)
    return Application(GRID_SAMPLE, constants, (input, grid))


RULES: dict[str, Callable[..., Application | None]] = {
    "linear": of_linear,
    "matmul": of_matmul,
    "__matmul__": of_matmul,
    "mm": of_mm,
    "bmm": of_bmm,
    **{f"conv{axes}d": partial(_of_convolution, axes) for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": partial(_of_transposed, axes) for axes in (1, 2, 3)},
    "scaled_dot_product_attention": of_attention,
    "embedding": of_embedding,
    "group_norm": of_group_norm,
    "im2col": of_unfold,
    "pow": of_power,
    "square": of_power,
    "huber_loss": of_huber_loss,
    "grid_sampler": of_grid_sample,
}
"""The operators that have a rule of their own, by the name under which PyTorch dispatches them."""
