"""One picture of a result: the speed-up of every mode, a panel for each batch size."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import InvalidRequestError
from .modes import OFF, is_adaptive
from .workload import PLAIN, RANDOM_TEXT, WITH_DRAFT, WITHOUT_DRAFT

_SERIES = (
    (PLAIN, "base model", "#3b6ea5"),
    (WITH_DRAFT, "adapters, with their draft weights", "#3f9b6d"),
    (WITHOUT_DRAFT, "adapters, drafter without draft weights", "#b7d7c2"),
    (RANDOM_TEXT, "base model on random text", "#c9a25a"),
)
_GROUP_WIDTH = 0.84


def check_can_plot() -> None:
    """Raises InvalidRequestError unless matplotlib is installed: better before the measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'outrider[bench]'", param="plot")


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the picture as a PNG.

    Bars are means over the adapters, with a dot for each; under each bar stands its acceptance length.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["mode"] != OFF]
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    series = [entry for entry in _SERIES if any(row["kind"] == entry[0] for row in rows)]
    columns = min(2, len(batch_sizes)) or 1
    lines = -(-len(batch_sizes) // columns) or 1
    width = max(5.6, 1.2 + 0.34 * len(modes) * len(series)) * columns
    figure = Figure(figsize=(width, 3.7 * lines + 1.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten().tolist()
    for axis, batch_size in zip(axes, batch_sizes, strict=False):
        panel = [row for row in rows if row["batch_size"] == batch_size]
        _draw_panel(axis, panel, modes, series)
        axis.set_title(f"batch size {batch_size}", fontsize=11, loc="left", fontweight="bold")
    for axis in axes[len(batch_sizes) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("speed-up over no speculation")
    if axes:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=max(1, min(len(names), int(width // 3.8))),
            frameon=False,
            fontsize=9,
        )
    figure.suptitle(_title(report), fontsize=12, x=0.01, ha="left", wrap=True)
    figure.savefig(file, format="png")


def _title(report: dict[str, Any]) -> str:
    model, machine = report["model"], report["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    head = f"Speculative decoding: {model['name']}, {model['num_parameters'] / 1e6:.3g}M parameters, {model['dtype']}"
    if model.get("inflated_from"):
        head += f" (inflated from {model['inflated_from']})"
    notes = "bar: speed-up, median of rounds (adapters: mean; dots: each); figure at its foot: acceptance length"
    return "\n".join(
        [*report["labels"], head, f"{where}; {report['settings']['num_speculative_tokens']} drafts", notes]
    )


def _draw_panel(axis: Any, rows: Sequence[dict[str, Any]], modes: Sequence[str], series: Sequence[Any]) -> None:
    width = _GROUP_WIDTH / max(1, len(series))
    for x, mode in enumerate(modes):
        bars = [
            (color, [row for row in rows if row["mode"] == mode and row["kind"] == kind]) for kind, _, color in series
        ]
        bars = [bar for bar in bars if bar[1]]
        for place, (color, found) in enumerate(bars):
            _draw_bar(axis, x + (place - (len(bars) - 1) / 2) * width, width * 0.92, color, found)
    for _, label, color in series:
        axis.bar(0, 0, color=color, label=label)
    axis.axhline(1.0, color="#a03030", linewidth=1.2, linestyle="--", zorder=1, label="no speculation")
    axis.set_xticks(range(len(modes)), [_label(rows, m) for m in modes], fontsize=9)
    axis.set_xlim(-0.6, len(modes) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e4e4e4", zorder=0)
    axis.set_axisbelow(True)


def _draw_bar(axis: Any, x: float, width: float, color: str, rows: Sequence[dict[str, Any]]) -> None:
    """One bar, the mean of `rows`; its figure stands above it and above the dots of single adapters."""
    speedups = [row["speedup"] for row in rows]
    height = statistics.mean(speedups)
    axis.bar(x, height, width, color=color, zorder=2)
    if len(rows) > 1:
        axis.plot([x] * len(rows), speedups, ".", color="#202020", markersize=4, alpha=0.7, zorder=3)
    text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7, "zorder": 4}
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axis.annotate(f"{height:.2f}", (x, max(speedups)), (0, 4), bbox=box, **text)
    lengths = [row["acceptance_length"] for row in rows if row["acceptance_length"] is not None]
    axis.annotate(f"{statistics.mean(lengths):.1f}" if lengths else "–", (x, 0), (0, 3), **text)


def _label(rows: Sequence[dict[str, Any]], mode: str) -> str:
    if not is_adaptive(mode):
        return mode
    method = next((str(row["method"]) for row in rows if row["mode"] == mode), "")
    return f"adaptive\n({method})"
