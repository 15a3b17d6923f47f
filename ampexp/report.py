"""The table at the end of a run: what ran, how fast, how accurate, where it is recorded."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from ampexp.kernels.formats import FLOAT32_ACCUMULATE

if TYPE_CHECKING:
    from ampexp.summary import RunSummary


def rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Give the table's lines as (what, value)."""
    record = summary.record
    level = record["level"]
    if record["requested_level"] != level:
        level = f"{level} (resolved from {record['requested_level']})"
    lines = [
        ("level", level),
        ("cast type", record["cast_model_type"]),
        ("BatchNorm and LayerNorm", record["keep_batchnorm_fp32"]),
        ("loss scale", _loss_scale(summary)),
        ("arithmetic", record["arithmetic"]),
        ("boosts in effect", f"{record['boost_level']}: {record['boosts']}"),
    ]
    if "boost_note" in record:
        lines.append(("boost note", record["boost_note"]))
    return [
        *lines,
        ("samples per second", _rate(summary)),
        ("step seconds", _step_seconds(summary)),
        ("data wait / compute seconds", f"{summary.data_seconds:.3g} / {summary.compute_seconds:.3g}"),
        ("steps", f"{summary.num_steps:,} in {summary.num_epochs} epochs, {summary.num_samples:,} samples"),
        ("overflows / skipped steps", _overflows(summary)),
        ("peak tensor memory", _bytes(summary.peak_tensor_bytes)),
        ("peak process memory", _bytes(summary.process_peak_bytes)),
        *((f"test {key}", _number(key, value)) for key, value in summary.test.items()),
        ("recorded at", summary.where),
    ]


def table(summary: RunSummary) -> str:
    """Give the table as plain text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for what, value in rows(summary):
        grid.add_row(Text(what), Text(value))
    out = io.StringIO()
    width = max(len(value) for _, value in rows(summary)) + 40
    Console(file=out, width=max(width, 80)).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _loss_scale(summary: RunSummary) -> str:
    word = summary.record["loss_scale_manager"]
    return word if word == "none" else f"{word}, at the end {summary.final_loss_scale:g}"


def _rate(summary: RunSummary) -> str:
    if summary.samples_per_second is None:
        return "not measured: the run was not longer than its warm-up"
    is_emulated = summary.record["arithmetic"].startswith(FLOAT32_ACCUMULATE)
    mark = ", not the accelerator's speed" if is_emulated else ""
    return f"{summary.samples_per_second:,.0f} over {summary.num_timed_steps:,} timed steps{mark}"


def _step_seconds(summary: RunSummary) -> str:
    if summary.step_seconds_median is None or summary.step_seconds_p95 is None:
        return "not measured"
    return f"median {summary.step_seconds_median:.4g}, p95 {summary.step_seconds_p95:.4g}"


def _overflows(summary: RunSummary) -> str:
    skipped = f"{summary.num_skipped_steps} ({summary.num_skipped_samples:,} samples)"
    return f"{summary.num_overflows} / {skipped}"


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _number(key: str, value: float) -> str:
    if math.isnan(value):
        return "nan: diverged"
    return f"{value:.2%}" if key == "accuracy" else f"{value:.4g}"
