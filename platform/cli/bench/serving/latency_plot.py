"""One picture of a measurement: the cumulative distribution of each latency over the requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..request_figures import RequestRecord, values
from .load_options import METRICS

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token, the first excluded",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_COLOR, _MARK = "#3b6ea5", "#a03030"


def draw_latencies(report: dict[str, Any], records: Sequence[RequestRecord], file: Path) -> None:
    """Write the picture as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [record for record in records if record.error is None]
    found = {metric: 1e3 * np.sort(np.asarray(values(good, metric))) for metric in METRICS}
    shown = [metric for metric in METRICS if len(found[metric])]
    rows = max(1, (len(shown) + 1) // 2)
    figure = Figure(figsize=(10.5, 0.6 + 3.3 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2).flatten().tolist()
    for axis, metric in zip(axes, shown, strict=False):
        _draw_shares(axis, metric, found[metric])
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    if not shown:
        axes[0].text(0, 0.5, "no request was answered")
    figure.suptitle(_title(report), fontsize=11, x=0.01, ha="left")
    figure.savefig(file, format="png")


def _draw_shares(axis: Any, metric: str, ms: Any) -> None:
    axis.set_title(f"{metric.upper()}: {_NAMES[metric]}", fontsize=10, loc="left", fontweight="bold")
    axis.set_xlabel("ms")
    axis.set_ylabel("share of the requests" if metric != "itl" else "share of the gaps")
    axis.set_ylim(0, 1.02)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e4e4e4")
    # From the left edge, so that a single value is a step too.
    axis.step([ms[0], *ms], np.arange(len(ms) + 1) / len(ms), where="post", color=_COLOR, linewidth=1.8)
    axis.set_xlim(0, 1.05 * float(ms[-1]) or 1.0)
    for q in (50, 99):
        value = float(np.percentile(ms, q))
        axis.plot([value], [q / 100], "o", color=_MARK, markersize=4)
        left = value > 0.7 * float(ms[-1])
        axis.annotate(
            f"p{q} {value:.4g} ms",
            (value, q / 100),
            textcoords="offset points",
            xytext=(-6 if left else 6, -12),
            ha="right" if left else "left",
            fontsize=8,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )


def _title(report: dict[str, Any]) -> str:
    machine, figures = report["machine"], report["figures"]
    head = (
        f"{report['benchmark']}: {report['model']['name']}; {figures['completed']} requests, "
        f"{figures['output_throughput']:.1f} output tokens/s, {figures['request_throughput']:.2f} requests/s"
    )
    return "\n".join([*report["labels"], head, f"{machine['gpu'] or machine['cpu']}, {machine['date']}"])
