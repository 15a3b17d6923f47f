"""Formats: asked for by name, refused by name, believed when a measurement agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ampexp.amp import auto_mixed_precision, build_train_network, custom_mixed_precision
from ampexp.kernels import formats
from ampexp.kernels.formats import FORMATS, LOW_DTYPES, arithmetic, format_name, why_not_native
from tests.kernels.kit import Spy

NAMES = pytest.mark.parametrize("name", FORMATS)
UNKNOWN = ["tfloat32", "float8_e4m3fn", "float32", "float64", "int8", ""]


def test_the_table_is_what_pytorch_calls_its_dtypes() -> None:
    assert {name: row.dtype for name, row in FORMATS.items()} == {
        name: getattr(torch, name) for name in FORMATS
    }
    assert set(LOW_DTYPES) == {torch.float16, torch.bfloat16}
    assert [format_name(dtype) for dtype in LOW_DTYPES] == list(FORMATS)
    assert [format_name(name) for name in FORMATS] == list(FORMATS)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_formats_are_refused_by_name(name: str) -> None:
    for device in ("cpu", "cuda"):
        for ask in (format_name, lambda given, d=device: why_not_native(d, given)):
            with pytest.raises(ValueError, match="low-precision format must be one of") as refused:
                ask(name)
            text = str(refused.value)
            assert repr(name) in text
            assert all(known in text for known in FORMATS)
            assert "\n" not in text


def built(**kwargs: Any) -> Any:
    network = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return build_train_network(network, optimizer, nn.CrossEntropyLoss(), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64], ids=str)
def test_other_formats_are_refused_at_build(dtype: torch.dtype) -> None:
    linear = nn.Linear(4, 3)
    for build in (
        lambda: built(level="O3", cast_model_type=dtype),
        lambda: auto_mixed_precision(linear, "O3", dtype),
        lambda: custom_mixed_precision(linear, white_list=[nn.Linear], dtype=dtype),
    ):
        with pytest.raises(ValueError, match=str(dtype)) as refused:
            build()
        assert "\n" not in str(refused.value)
        assert "bfloat16" in str(refused.value)


@NAMES
@pytest.mark.parametrize("device", ["cuda", "mps", "xpu", "meta"])
def test_accelerators_compute_by_themselves(device: str, name: str) -> None:
    assert why_not_native(device, FORMATS[name].dtype) is None
    assert arithmetic(device, FORMATS[name].dtype) == "native"


@NAMES
def test_without_a_flag_the_reason_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_flag", lambda _: False)
    reason = f"this CPU has no {name} instructions"
    assert why_not_native("cpu", name) == reason
    assert arithmetic("cpu", name).startswith(f"float32_accumulate ({reason}")


@pytest.mark.parametrize(("times", "believed"), [(0.5, True), (1.5, True), (1.6, False), (20.0, False)])
@NAMES
def test_a_flag_is_believed_when_a_measurement_agrees(
    name: str, times: float, believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "has_flag", lambda _: True)
    monkeypatch.setattr(formats, "times_slower", lambda _: times)
    reason = f"this CPU declares {name} instructions, but multiplies {times:.1f} times slower than in float32"
    assert why_not_native("cpu", name) == (None if believed else reason)
    expected = f"native ({name} instructions)" if believed else f"float32_accumulate ({reason}"
    assert arithmetic("cpu", name).startswith(expected)


@NAMES
def test_a_flag_that_lies_is_caught_by_the_real_measurement(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if formats.has_flag(name):
        pytest.skip(f"this CPU has {name} instructions")
    monkeypatch.setattr(formats, "has_flag", lambda _: True)
    assert formats.times_slower(name) > formats.SLOWEST_NATIVE
    assert "declares" in str(why_not_native("cpu", name))
    assert arithmetic("cpu", name).startswith("float32_accumulate")


@NAMES
def test_a_process_measures_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_flag", lambda _: True)
    why_not_native("cpu", name)
    measured = formats.times_slower.cache_info().misses
    assert len({why_not_native("cpu", name) for _ in range(3)}) == 1
    assert len({arithmetic("cpu", FORMATS[name].dtype) for _ in range(3)}) == 1
    assert formats.times_slower.cache_info().misses == measured


def test_without_a_flag_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_flag", lambda _: False)
    before = formats.times_slower.cache_info()
    assert [why_not_native("cpu", name) for name in FORMATS]
    assert formats.times_slower.cache_info() == before


@NAMES
def test_the_record_names_the_way_and_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_flag", lambda _: False)
    step = built(level="O3", cast_model_type=FORMATS[name].dtype)
    assert step.record["arithmetic"] == arithmetic("cpu", name)
    assert f"no {name} instructions" in step.record["arithmetic"]
    monkeypatch.setattr(formats, "has_flag", lambda _: True)
    monkeypatch.setattr(formats, "times_slower", lambda _: 1.0)
    step = built(level="O3", cast_model_type=FORMATS[name].dtype)
    assert step.record["arithmetic"] == f"native ({name} instructions)"


@pytest.mark.parametrize("kwargs", [{"level": "O0"}, {"level": "O3", "cast_model_type": torch.float32}])
def test_without_low_precision_the_record_says_native(kwargs: dict[str, Any]) -> None:
    assert built(**kwargs).record["arithmetic"] == "native"


@NAMES
def test_what_runs_is_what_the_record_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network on a processor with instructions is left to PyTorch, on one without to float32."""
    for native in (False, True):
        monkeypatch.setattr(formats, "has_flag", lambda _, native=native: native)
        monkeypatch.setattr(formats, "times_slower", lambda _: 1.0)
        step = built(level="O3", cast_model_type=FORMATS[name].dtype)
        with Spy() as spy:
            step(torch.randn(6, 4), torch.arange(6) % 3)
        assert bool(spy.low_products()) == native
        assert step.record["arithmetic"].startswith("native") == native
