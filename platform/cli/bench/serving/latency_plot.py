"""One picture of a measurement: the cumulative distribution of each latency over the requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench_options import METRICS
from ..pictures import BLUE, RED, panels, save
from ..request_figures import RequestRecord, values
from .vllm_tables import METRIC_NAMES


def draw_latencies(report: dict[str, Any], records: Sequence[RequestRecord], file: Path) -> None:
    """Write the picture as a PNG."""
    good = [record for record in records if record.error is None]
    found = {metric: 1e3 * np.sort(np.asarray(values(good, metric))) for metric in METRICS}
    shown = {metric: ms for metric, ms in found.items() if len(ms)}
    machine, figures = report["machine"], report["figures"]
    title = [
        *report["labels"],
        f"{report['benchmark']}: {report['model']['name']}; {figures['completed']} requests, "
        f"{figures['output_throughput']:.1f} output tokens/s, {figures['request_throughput']:.2f} requests/s",
        f"{machine['gpu'] or machine['cpu']}, {machine['date']}",
    ]
    rows = max(1, (len(shown) + 1) // 2)
    figure, axes = panels(title, rows, 2, (10.5, 0.6 + 3.3 * rows))
    for axis, (metric, ms) in zip(axes.flat, shown.items(), strict=False):
        _draw_shares(axis, metric, ms)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    if not shown:
        axes[0][0].text(0, 0.5, "no request was answered")
    save(figure, file)


def _draw_shares(axis: Any, metric: str, ms: Any) -> None:
    axis.set_title(f"{metric.upper()}: {METRIC_NAMES[metric].lower()}", fontsize=10, loc="left", fontweight="bold")
    axis.set_xlabel("ms")
    axis.set_ylabel("share of the requests" if metric != "itl" else "share of the gaps")
    axis.ecdf(ms, color=BLUE, linewidth=1.8)
    axis.set_xlim(0, 1.05 * float(ms[-1]) or 1.0)
    for q in (50, 99):
        value = float(np.percentile(ms, q))
        axis.plot([value], [q / 100], "o", color=RED, markersize=4)
        left = value > 0.7 * float(ms[-1])
        place = {"textcoords": "offset points", "xytext": (-6 if left else 6, -12), "ha": "right" if left else "left"}
        axis.annotate(f"p{q} {value:.4g} ms", (value, q / 100), fontsize=8, **place)
