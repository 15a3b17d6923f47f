"""What managers and scalers are made of, and scaling by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ampexp.amp import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    LossScaleManager,
    StaticLossScaler,
    all_finite,
)
from tests.amp.kit import (
    INF,
)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *((lambda v=v: FixedLossScaleManager(v), ValueError) for v in (0, 0.5, -1, INF, math.nan, 1e39, 10**400)),
        *((lambda v=v: FixedLossScaleManager(v), TypeError) for v in (True, "128", None, [1])),
        *((lambda v=v: FixedLossScaleManager(2, v), TypeError) for v in (1, None, "no")),
        *((lambda v=v: DynamicLossScaleManager(v), ValueError) for v in (0, 0.9, INF, math.nan)),
        *((lambda v=v: DynamicLossScaleManager(v), TypeError) for v in (True, "1")),
        *((lambda v=v: DynamicLossScaleManager(2, v), ValueError) for v in (1, 0.5, -2, INF, math.nan)),
        *((lambda v=v: DynamicLossScaleManager(2, v), TypeError) for v in (True, None)),
        *((lambda v=v: DynamicLossScaleManager(2, 2, v), ValueError) for v in (0, -1)),
        *((lambda v=v: DynamicLossScaleManager(2, 2, v), TypeError) for v in (2.0, True, "2")),
        *((lambda v=v: DynamicLossScaler(v, 2, 2), ValueError) for v in (0, math.nan)),
        *((lambda v=v: DynamicLossScaler(2, 2, v), TypeError) for v in (2.5, True)),
        *((lambda v=v: StaticLossScaler(v), ValueError) for v in (0, -1, INF, math.nan)),
        *((lambda v=v: StaticLossScaler(v), TypeError) for v in (True, "1")),
    ],
)  # fmt: skip
def test_loss_scale_parameters(make: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="must be"):
        make()


def test_manager_defaults() -> None:
    assert FixedLossScaleManager().get_loss_scale() == 128
    assert FixedLossScaleManager().get_drop_overflow_update() is True
    assert FixedLossScaleManager().get_update_cell() is None
    assert DynamicLossScaleManager().get_loss_scale() == 2**24
    with pytest.raises(TypeError):
        LossScaleManager()


def test_scalers_by_hand() -> None:
    scaler = StaticLossScaler(8.0)
    tree = {"a": (torch.ones(2), [torch.ones(1, dtype=torch.float16)])}
    scaled = scaler.scale(tree)
    assert scaled["a"][0].tolist() == [8, 8]
    back = scaler.unscale(scaled)
    assert back["a"][1][0].dtype == torch.float32
    assert back["a"][1][0].tolist() == [1]
    assert scaler.adjust(False) is False
    dynamic = DynamicLossScaler(8.0, 2, 1)
    assert dynamic.adjust(torch.tensor(False)) is True
    assert dynamic.scale_value == 4
    with pytest.raises(TypeError, match="inputs must be a tensor"):
        scaler.scale(3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_all_finite() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, INF], (3,))
    overflowing = torch.sparse_coo_tensor([[0, 0]], [60000.0, 60000.0], (3,), dtype=torch.float16)
    assert all_finite([]).item()
    assert all_finite(good).item()
    assert all_finite([good, torch.arange(3), torch.ones(2, dtype=torch.complex64)]).item()
    for wrong in (bad, sparse, overflowing, torch.tensor(complex(INF, 0))):
        assert not all_finite([good, wrong]).item()
    assert all_finite([good]).dtype == torch.bool
