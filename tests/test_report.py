from __future__ import annotations

from dataclasses import replace

import pytest

from ampexp.report import rows, table
from ampexp.summary import RunSummary

RECORD = {
    "level": "O2", "requested_level": "auto", "cast_model_type": "float16", "keep_batchnorm_fp32": "float32",
    "loss_scale_manager": "dynamic 1024", "arithmetic": "native", "boost_level": "O2", "boosts": "none",
    "boost_note": "as O1",
}  # fmt: skip
SUMMARY = RunSummary(
    record=RECORD, test={"loss": 0.5, "accuracy": 0.975}, held={}, num_steps=10, num_epochs=2, num_samples=640,
    num_timed_steps=5, samples_per_second=1234.5, step_seconds_median=0.05, step_seconds_p95=0.06, data_seconds=0.1,
    compute_seconds=0.5, num_overflows=3, num_skipped_steps=3, num_skipped_samples=192, final_loss_scale=128.0,
    peak_tensor_bytes=3 * 2**20, process_peak_bytes=2**30, where="here",
)  # fmt: skip


def test_the_table_says_what_ran_and_how() -> None:
    said = dict(rows(SUMMARY))
    assert said["level"] == "O2 (resolved from auto)"
    assert said["loss scale"] == "dynamic 1024, at the end 128"
    assert said["boost note"] == "as O1"
    assert said["samples per second"] == "1,234 over 5 timed steps"
    assert said["overflows / skipped steps"] == "3 / 3 (192 samples)"
    assert said["peak tensor memory"] == "3.0 MiB"
    assert said["test accuracy"] == "97.50%"
    text = table(SUMMARY)
    assert all(value in text for value in said.values())


def test_what_was_not_measured_is_said() -> None:
    summary = replace(SUMMARY, samples_per_second=None, step_seconds_median=None, step_seconds_p95=None,
                      test={"loss": float("nan")})  # fmt: skip
    said = dict(rows(summary))
    assert said["samples per second"].startswith("not measured")
    assert said["step seconds"] == "not measured"
    assert said["test loss"] == "nan: diverged"
    assert "samples_per_second" not in summary.metrics()


@pytest.mark.parametrize(("count", "said"), [(100, "0.1 KiB"), (2**20, "1.0 MiB")])
def test_small_memory_is_not_nothing(count: int, said: str) -> None:
    assert dict(rows(replace(SUMMARY, peak_tensor_bytes=count)))["peak tensor memory"] == said
