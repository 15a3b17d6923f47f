"""What has no rule runs in the mode: no product of it reaches PyTorch's kernels with a low operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.kernels.accumulate import Accumulation
from ampexp.kernels.formats import LOW_DTYPES
from ampexp.kernels.table import ACCUMULATED
from tests.kernels.kit import Spy, assert_same_bits, called, words

DTYPES = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape)


def layer(kind: type[nn.Module], *sizes: int, **kwargs: Any) -> nn.Module:
    return kind(*sizes, **kwargs)


MASK = torch.ones(6, 6, dtype=torch.bool).tril()
sdpa = F.scaled_dot_product_attention
Case = tuple[str, Callable[..., Any], Callable[[], list[Any]]]

FUNCTIONS: dict[str, Case] = {
    "einsum": ("einsum", lambda a, b: torch.einsum("bij,jk->bik", a, b), lambda: [r(2, 3, 40), r(40, 5)]),
    "einsum_of_three": ("einsum", lambda *t: torch.einsum("ij,jk,kl->il", *t), lambda: [r(3, 9), r(9, 9), r(9, 2)]),
    "tensordot": ("tensordot", lambda a, b: torch.tensordot(a, b, dims=1), lambda: [r(2, 3, 40), r(40, 5)]),
    "bilinear": ("bilinear", F.bilinear, lambda: [r(4, 9), r(4, 8), r(3, 9, 8), r(3)]),
    "addmm": ("addmm", torch.addmm, lambda: [r(3), r(5, 40), r(40, 3)]),
    "baddbmm": ("baddbmm", torch.baddbmm, lambda: [r(2, 5, 3), r(2, 5, 40), r(2, 40, 3)]),
    "addbmm": ("addbmm", torch.addbmm, lambda: [r(5, 3), r(2, 5, 40), r(2, 40, 3)]),
    "mv": ("mv", torch.mv, lambda: [r(5, 40), r(40)]),
    "addmv": ("addmv", torch.addmv, lambda: [r(5), r(5, 40), r(40)]),
    "dot": ("dot", torch.dot, lambda: [r(40), r(40)]),
    "inner": ("inner", torch.inner, lambda: [r(2, 3, 40), r(40)]),
    "ger": ("ger", torch.ger, lambda: [r(4), r(3)]),
    "outer": ("outer", torch.outer, lambda: [r(4), r(3)]),
    "addr": ("addr", torch.addr, lambda: [r(4, 3), r(4), r(3)]),
    "multi_dot": ("linalg_multi_dot", lambda *t: torch.linalg.multi_dot(t), lambda: [r(3, 9), r(9, 8), r(8, 2)]),
    "vecdot": ("linalg_vecdot", torch.linalg.vecdot, lambda: [r(3, 40), r(3, 40)]),
    "matmul_of_vectors": ("matmul", torch.matmul, lambda: [r(40), r(40)]),
    "matmul_with_a_vector": ("matmul", torch.matmul, lambda: [r(2, 5, 40), r(40)]),
    "matmul_broadcast": ("matmul", torch.matmul, lambda: [r(3, 1, 5, 40), r(2, 40, 3)]),
    "linear_of_a_vector": ("linear", F.linear, lambda: [r(40), r(3, 40), r(3)]),
    "conv_of_one_image": ("conv2d", F.conv2d, lambda: [r(3, 6, 6), r(2, 3, 3, 3), r(2)]),
    "conv_same": ("conv2d", lambda *t: F.conv2d(*t, padding="same"), lambda: [r(2, 3, 6, 6), r(2, 3, 3, 3), r(2)]),
    "conv_tbc": ("conv_tbc", torch.conv_tbc, lambda: [r(7, 2, 3), r(3, 3, 4), r(4)]),
    "cdist": ("cdist", torch.cdist, lambda: [r(5, 8), r(4, 8)]),
    "attention_mask": (sdpa.__name__, lambda *t: sdpa(*t, attn_mask=MASK), lambda: [r(2, 2, 6, 8)] * 3),
    "attention_bias": (sdpa.__name__, sdpa, lambda: [*[r(2, 2, 6, 8)] * 3, r(6, 6)]),
    "attention_dropout": (sdpa.__name__, lambda *t: sdpa(*t, dropout_p=0.2), lambda: [r(2, 2, 6, 8)] * 3),
    "attention_gqa": (
        sdpa.__name__, lambda *t: sdpa(*t, enable_gqa=True), lambda: [r(2, 4, 6, 8), r(2, 2, 6, 8), r(2, 2, 6, 8)],
    ),
    "attention_of_matrices": (sdpa.__name__, sdpa, lambda: [r(6, 8)] * 3),
    "attention_of_no_rows": (sdpa.__name__, sdpa, lambda: [r(2, 2, 0, 8), r(2, 2, 3, 8), r(2, 2, 3, 8)]),
    "attention_of_two_widths": (sdpa.__name__, sdpa, lambda: [r(2, 2, 5, 8), r(2, 2, 6, 8), r(2, 2, 6, 4)]),
    "embedding_bag": (
        "embedding_bag", lambda w: F.embedding_bag(torch.tensor([[0, 1], [1, 1]]), w), lambda: [r(4, 3)],
    ),
    "embedding_bag_weighted": (
        "embedding_bag",
        lambda w, x: F.embedding_bag(torch.tensor([[0, 1], [1, 1]]), w, per_sample_weights=x, mode="sum"),
        lambda: [r(4, 3), r(2, 2)],
    ),
}  # fmt: skip
"""The name under which it is called, the function, its low operands."""

LAYERS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": ("lstm", lambda: layer(nn.LSTM, 5, 6, num_layers=2, bidirectional=True), (4, 3, 5)),
    "LSTM_projected": ("lstm", lambda: layer(nn.LSTM, 5, 6, proj_size=2), (4, 3, 5)),
    "GRU": ("gru", lambda: layer(nn.GRU, 5, 6, batch_first=True), (4, 3, 5)),
    "RNN": ("rnn_tanh", lambda: layer(nn.RNN, 5, 6), (4, 3, 5)),
    "RNN_relu": ("rnn_relu", lambda: layer(nn.RNN, 5, 6, nonlinearity="relu"), (4, 3, 5)),
    "LSTMCell": ("lstm_cell", lambda: layer(nn.LSTMCell, 5, 6), (4, 5)),
    "GRUCell": ("gru_cell", lambda: layer(nn.GRUCell, 5, 6), (4, 5)),
    "RNNCell": ("rnn_tanh_cell", lambda: layer(nn.RNNCell, 5, 6), (4, 5)),
}  # fmt: skip


def prepared(case: str, dtype: torch.dtype) -> tuple[str, Callable[..., Any], list[Tensor]]:
    """Give a call's name, its function and its low operands that want gradients."""
    torch.manual_seed(0)
    if case in FUNCTIONS:
        name, func, make = FUNCTIONS[case]
        return name, func, [x.to(dtype).requires_grad_() for x in make()]
    name, build, shape = LAYERS[case]
    module = build().to(dtype)
    return name, lambda x, *_: module(x), [r(*shape).to(dtype).requires_grad_(), *module.parameters()]  # fmt: skip


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else first(result[0])


@DTYPES
@pytest.mark.parametrize("case", [*FUNCTIONS, *LAYERS])
def test_no_product_is_low(case: str, dtype: torch.dtype) -> None:
    """Seen below the mode, in forward and in backward; every operand gets a gradient of its dtype."""
    name, func, operands = prepared(case, dtype)
    accumulation = Accumulation()
    with Spy() as spy:
        result = first(accumulation.call(name, func, tuple(operands), {}))
        with accumulation.backward_scope():
            gradients = torch.autograd.grad(result.float().square().sum(), operands)
    assert result.dtype is dtype
    assert spy.low_products() == []
    for gradient, operand in zip(gradients, operands, strict=True):
        assert gradient.dtype is dtype
        assert gradient.shape == operand.shape


OWN_WAY_IS_WIDE = words(
    """
ger outer vecdot attention_bias attention_dropout attention_of_matrices attention_of_two_widths attention_of_no_rows
"""
)
"""PyTorch computes these by elementary operators, or widens by itself."""


@pytest.mark.parametrize("case", [*FUNCTIONS, *LAYERS])
def test_pytorchs_own_way_would_be_seen(case: str) -> None:
    """The law above can fail: without the mode, these compute in low precision."""
    _, func, operands = prepared(case, torch.bfloat16)
    with Spy() as spy:
        if case == "cdist":
            with pytest.raises(RuntimeError, match="not implemented for"):
                func(*operands)
            return
        first(func(*operands)).float().square().sum().backward()
    assert bool(spy.low_products()) == (case not in OWN_WAY_IS_WIDE)


@pytest.mark.parametrize("case", [*FUNCTIONS, *LAYERS])
def test_inference_mode_computes_what_no_grad_does(case: str) -> None:
    """There, composite operators arrive whole: they are to be taken apart all the same."""
    results, products = [], []
    for scope in (torch.no_grad, torch.inference_mode):
        name, func, operands = prepared(case, torch.float16)
        torch.manual_seed(1)
        with scope(), Spy() as spy:
            results.append(first(called(name, func, tuple(operands))).clone())
        assert spy.low_products() == []
        products.append(spy.names() & ACCUMULATED)
    assert bool(products[0]) == bool(products[1]) or case in OWN_WAY_IS_WIDE
    assert_same_bits(*results)


@DTYPES
def test_a_recurrent_layer_is_its_steps(dtype: torch.dtype) -> None:
    """Bitwise the same layer written out, each product in float32 and rounded once."""
    torch.manual_seed(0)
    layer = nn.RNN(5, 6).to(dtype)
    x = torch.randn(4, 3, 5).to(dtype)
    with torch.no_grad():
        mine = called("rnn_tanh", layer, (x,))[0]
        hidden, states = torch.zeros(3, 6).to(dtype), []
        inside, between, b_inside, b_between = (p.float() for p in layer.parameters())
        for step in x:
            from_input = F.linear(step.float(), inside, b_inside).to(dtype)
            from_state = F.linear(hidden.float(), between, b_between).to(dtype)
            hidden = (from_state + from_input).tanh()
            states.append(hidden)
    assert_same_bits(mine, torch.stack(states))


@pytest.mark.parametrize("case", ["einsum", "bilinear", "attention_bias", "LSTM"])
def test_derivatives_of_derivatives_stay_in_the_mode(case: str) -> None:
    name, func, operands = prepared(case, torch.bfloat16)
    accumulation = Accumulation()
    with Spy() as spy:
        result = first(accumulation.call(name, func, tuple(operands), {}))
        with accumulation.backward_scope():
            gradients = torch.autograd.grad(
                result.float().square().sum(), operands, create_graph=True
            )
            sum(g.float().square().sum() for g in gradients).backward()
    assert spy.low_products() == []
    assert all(x.grad is not None and x.grad.isfinite().all() for x in operands)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@DTYPES
def test_a_bags_gradient_is_summed_in_float32(dtype: torch.dtype, mode: str) -> None:
    """A row of the table that many bags hold gets the sum of their gradients, rounded once."""
    torch.manual_seed(0)
    bags = torch.randint(0, 2, (64, 64))
    table = torch.randn(4, 3).to(dtype).requires_grad_()
    gradient = torch.randn(64, 3).to(dtype)
    accumulation = Accumulation()
    result = accumulation.call("embedding_bag", F.embedding_bag, (bags, table), {"mode": mode})
    with accumulation.backward_scope():
        (mine,) = torch.autograd.grad(result, table, gradient)
    wide = table.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(F.embedding_bag(bags, wide, mode=mode), wide, gradient.float())
    assert_same_bits(mine, exact.to(dtype))
