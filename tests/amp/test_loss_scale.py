"""Laws of the loss scale as a state machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampexp.amp import DynamicLossScaleManager, DynamicLossScaler, FixedLossScaleManager
from ampexp.amp.loss_scale import (
    FLOAT32_MAX,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    NoLossScale,
)

scales = st.builds(
    DynamicLossScale,
    st.floats(1, FLOAT32_MAX),
    st.floats(1, FLOAT32_MAX, exclude_min=True),
    st.integers(1, 5),
)
histories = st.lists(st.booleans(), max_size=60)


@given(scales, histories)
def test_dynamic_scale_stays_between_1_and_inf(
    scale: DynamicLossScale, history: list[bool]
) -> None:
    run = 0
    for finite in history:
        before, scale = scale, scale.adjust(finite)
        assert 1 <= scale.value <= FLOAT32_MAX
        assert math.isfinite(scale.value)
        run = run + 1 if finite else 0
        if not finite:
            assert scale.value == max(before.value / before.scale_factor, 1.0)
        elif run % scale.scale_window:  # within the window nothing moves
            assert scale.value == before.value
        else:
            grown = before.value * before.scale_factor
            assert scale.value == (grown if grown <= FLOAT32_MAX else before.value)


@given(
    st.floats(1, 2**30), st.floats(1.5, 8), st.integers(1, 5), histories
)  # fmt: skip
def test_manager_cell_scaler_and_value_agree(
    start: float, factor: float, window: int, history: list[bool]
) -> None:
    manager, scaler = (
        DynamicLossScaleManager(start, factor, window),
        DynamicLossScaler(start, factor, window),
    )
    update, by_cell = manager.get_update_cell(), start
    value = manager.loss_scale()
    for finite in history:
        manager.update_loss_scale(not finite)
        scaler.adjust(finite)
        by_cell = update(by_cell, not finite)
        value = value.adjust(finite)
        assert manager.get_loss_scale() == scaler.scale_value == by_cell == value.value


@pytest.mark.parametrize(
    "scale", [NoLossScale(), FixedLossScale(8.0), FixedLossScale(8.0, skips=False)]
)
@pytest.mark.parametrize("finite", [True, False])
def test_constant_scales_stay_as_they_are(scale: LossScale, finite: bool) -> None:
    assert scale.adjust(finite) == scale


def test_scales_name_themselves() -> None:
    names = [
        NoLossScale(),
        FixedLossScaleManager(64).loss_scale(),
        DynamicLossScaleManager().loss_scale(),
    ]
    assert list(map(str, names)) == ["none", "fixed 64", f"dynamic {2**24:g}"]
