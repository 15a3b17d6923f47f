"""Whole operators on low-precision tensors: widened, computed in float32, rounded once, forward and backward.

PyTorch's autograd would ask for each product apart, and a gradient would be widened for every product it enters. Here
an operator is one autograd function by a rule: between forward and backward only low-precision tensors are kept.
"""

from __future__ import annotations

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
    already. Without it, backward computes again and leaves the rest to autograd: for what costs little.
    Of a `product`, the gradient of an operand does not depend on that operand.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    differentiate: Callable[..., Tensors] | None = None
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
            if rule.differentiate is None or torch.is_grad_enabled():
                return None, None, *_by_autograd(ctx, needed, gradient, operands)
            found = rule.differentiate(ctx.constants, needed, gradient.float(), *operands, *rest)
            return None, None, *(None if x is None else x.to(gradient.dtype) for x in found)


def _by_autograd(ctx: Any, needed: Any, gradient: Tensor, operands: Tensors) -> Tensors:
    """Compute again and differentiate; where a graph of the gradient is wanted, so that it has one."""
    graph_wanted = torch.is_grad_enabled()
    if ctx.shapes is not None:  # products without operands that their wanted gradients do not depend on
        operands = tuple(
            gradient.new_zeros(shape) if operand is None and shape is not None else operand
            for operand, shape in zip(operands, ctx.shapes, strict=True)
        )
    if not graph_wanted:
        operands = tuple(
            None if operand is None else operand.detach().requires_grad_(need)
            for operand, need in zip(operands, needed, strict=True)
        )
    with torch.enable_grad():
        result = ctx.rule.compute(ctx.constants, *operands)[0]
    wanted = [operand for operand, need in zip(operands, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=graph_wanted))  # type: ignore[arg-type]
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
    rows = gradient if gradient.dim() == 2 else gradient.flatten(0, -2)
    if needed[0]:
        w = w.float()
        of_x = torch.mm(w.t(), rows.t()).t() if x_by_columns else torch.mm(rows, w)
        of_x = of_x if rows is gradient else of_x.view(*gradient.shape[:-1], w.shape[1])
    if needed[1]:
        x = (x if x.dim() == 2 else x.flatten(0, -2)).float()
        of_w = torch.mm(rows.t(), x) if w_by_rows else torch.mm(x.t(), rows).t()
    return of_x, of_w, rows.sum(0) if needed[2] else None


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


LINEAR = Rule(_linear, _linear_gradients, product=True)
MATMUL = Rule(_matmul, _matmul_gradients, product=True)
CONVOLUTION = Rule(_convolution, _convolution_gradients)
ATTENTION = Rule(_attention, _attention_gradients)
EMBEDDING = Rule(_embedding, _embedding_gradients)


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


def of_widened(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Application | None:
    """Take any operator of one result: PyTorch's own in float32."""
    places = [index for index, value in enumerate(args) if _is_floating(value)]
    if any(map(_is_floating, kwargs.values())):
        return None
    rest = [None if index in places else value for index, value in enumerate(args)]
    return Application(WIDENED, (func, rest, kwargs, places), tuple(args[i] for i in places))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _widened(constants: Any, *operands: Tensor) -> tuple[Tensor]:
    func, args, kwargs, places = constants
    filled = dict(zip(places, operands, strict=True))
    wide = [filled[index].float() if index in filled else arg for index, arg in enumerate(args)]
    result: Tensor = func(*wide, **kwargs)
    return (result.to(operands[0].dtype),)


WIDENED = Rule(_widened)

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
}
"""The operators that have a rule of their own, by the name under which PyTorch dispatches them."""
