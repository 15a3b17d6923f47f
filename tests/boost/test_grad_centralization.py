"""Laws of gradient centralisation, dense and sparse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampexp.amp import build_train_network
from ampexp.boost import GradCentralization, centralize


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 9))
def test_each_units_gradient_has_mean_zero(shape: list[int], seed: int) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    before = grad.clone()
    result = centralize(grad)
    assert result.shape == grad.shape
    assert result.flatten(1).mean(1).abs().max() < 1e-12
    torch.testing.assert_close(centralize(result), result)
    rest = grad - result  # what was taken is one number a unit
    assert torch.allclose(rest.flatten(1), rest.flatten(1)[:, :1])
    assert torch.equal(grad, before)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_biases_are_left_alone(shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape)
    assert centralize(grad) is grad


def test_sparse_is_dense_row_by_row() -> None:
    indices = torch.tensor([[0, 2, 2]])
    grad = torch.sparse_coo_tensor(indices, torch.randn(3, 4), (5, 4), check_invariants=True)
    result = centralize(grad)
    assert result.is_sparse
    torch.testing.assert_close(result.to_dense(), centralize(grad.to_dense()))


@pytest.mark.parametrize("sparse", [False, True])
def test_boost_centralizes_before_the_update(sparse: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
    start = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), boost_level="O1")
    train_network(torch.arange(10).view(5, 2) % 7, torch.arange(5) % 3)
    moves = [a - b.detach() for a, b in zip(start, network.parameters(), strict=True)]
    for move in moves[:2]:
        assert move.abs().sum() > 0
        torch.testing.assert_close(move.mean(1), torch.zeros(len(move)), atol=1e-6, rtol=0)
    assert moves[2].mean().abs() > 0 or moves[2].abs().sum() > 0
    assert "grad_centralization (2 weights centralised)" in train_network.record["boosts"]


def test_parameters_without_gradient_are_passed_over() -> None:
    network = nn.Linear(3, 2)
    calls: list[int] = []
    GradCentralization().wrap(lambda: calls.append(1), network)()
    assert calls == [1]
    assert network.weight.grad is None


def test_o2_says_what_it_holds() -> None:
    network = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), boost_level="O2")
    assert train_network.record["boost_note"] == "O2 holds the boosts of O1 in this version"
    assert [type(boost).__name__ for boost in train_network.boosts] == [
        "GradFreeze",
        "GradCentralization",
    ]
