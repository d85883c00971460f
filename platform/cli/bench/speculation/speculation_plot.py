"""One picture of a result: the speed-up of every mode, a panel for each batch size."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from .modes import OFF, is_adaptive
from .tasks import PLAIN, RANDOM_TEXT, WITH_DRAFT, WITHOUT_DRAFT

_SERIES = {
    PLAIN: ("base model", "#3b6ea5"),
    WITH_DRAFT: ("adapters, with their draft weights", "#3f9b6d"),
    WITHOUT_DRAFT: ("adapters, drafter without draft weights", "#b7d7c2"),
    RANDOM_TEXT: ("base model on random text", "#c9a25a"),
}
"""Label and colour by the kind of a row."""
_GROUP_WIDTH = 0.84


def check_can_plot() -> None:
    """Raises InvalidRequestError unless matplotlib is installed: better before the measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'outrider[bench]'", param="plot")


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the picture as a PNG. Bars are means over the adapters; under each bar stands its acceptance length."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["mode"] != OFF]
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    kinds = [kind for kind in _SERIES if any(row["kind"] == kind for row in rows)]
    width = max(7.0, 1.2 + 0.34 * len(modes) * len(kinds))
    figure = Figure(figsize=(width, 3.7 * max(1, len(batch_sizes)) + 1.5), dpi=130, layout="constrained")
    axes = figure.subplots(max(1, len(batch_sizes)), 1, sharey=True, squeeze=False).flatten().tolist()
    for axis, batch_size in zip(axes, batch_sizes, strict=False):
        _draw_panel(axis, [row for row in rows if row["batch_size"] == batch_size], modes, kinds)
        axis.set_title(f"batch size {batch_size}", fontsize=11, loc="left", fontweight="bold")
        axis.set_ylabel("speed-up over no speculation")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(_title(report), fontsize=12, x=0.01, ha="left", wrap=True)
    figure.savefig(file, format="png")


def _title(report: dict[str, Any]) -> str:
    model, machine = report["model"], report["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    head = f"Speculative decoding: {model['name']}, {model['num_parameters'] / 1e6:.3g}M parameters, {model['dtype']}"
    if model.get("inflated_from"):
        head += f" (inflated from {model['inflated_from']})"
    notes = "bar: speed-up, median of rounds (mean of adapters); at its foot: acceptance length"
    drafts = report["settings"]["num_speculative_tokens"]
    return "\n".join([*report["labels"], head, f"{where}; {drafts} drafts", notes])


def _draw_panel(axis: Any, rows: Sequence[dict[str, Any]], modes: Sequence[str], kinds: Sequence[str]) -> None:
    width = _GROUP_WIDTH / max(1, len(kinds))
    for x, mode in enumerate(modes):
        groups = [(kind, [row for row in rows if (row["mode"], row["kind"]) == (mode, kind)]) for kind in kinds]
        groups = [(kind, found) for kind, found in groups if found]
        for place, (kind, found) in enumerate(groups):
            center = x + (place - (len(groups) - 1) / 2) * width
            height = statistics.mean(row["speedup"] for row in found)
            axis.bar(center, height, width * 0.92, color=_SERIES[kind][1], zorder=2)
            lengths = [row["acceptance_length"] for row in found if row["acceptance_length"] is not None]
            text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7, "zorder": 3}
            axis.annotate(f"{height:.2f}", (center, height), (0, 3), **text)
            axis.annotate(f"{statistics.mean(lengths):.1f}" if lengths else "–", (center, 0), (0, 3), **text)
    for kind in kinds:
        axis.bar(0, 0, color=_SERIES[kind][1], label=_SERIES[kind][0])
    axis.axhline(1.0, color="#a03030", linewidth=1.2, linestyle="--", zorder=1, label="no speculation")
    methods = {row["mode"]: row["method"] for row in rows}
    ticks = [f"adaptive\n({methods[mode]})" if is_adaptive(mode) else mode for mode in modes]
    axis.set_xticks(range(len(modes)), ticks, fontsize=9)
    axis.set_xlim(-0.6, len(modes) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e4e4e4", zorder=0)
    axis.set_axisbelow(True)
