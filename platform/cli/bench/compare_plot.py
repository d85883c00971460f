"""One picture of a comparison: the ratio of each figure."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import Comparison

_BETTER, _WORSE, _SAME = "#3f9b6d", "#b5483f", "#9aa0a6"
_MOST = 60
"""Most figures in one picture. Of more figures it shows those of _KEY."""
_KEY = re.compile(r"(output_throughput|mean_\w+_ms|p99_itl_ms|_ms\.mean|itl_ms\.p99|acceptance_length)$")
_NOISE = 1.02
_ABOVE = (1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
_BELOW = (0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)


def draw_comparison(
    found: Sequence[Comparison], names: tuple[str, str], changes: Mapping[str, Any], labels: Sequence[str], file: Path
) -> None:
    """Write the picture as a PNG: a bar for each figure, the quotient B / A on a logarithmic axis around 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = list(found) if len(found) <= _MOST else [c for c in found if _KEY.search(c.name)][:_MOST]
    figure = Figure(figsize=(10, 1.9 + 0.27 * len(shown)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis: Any = figure.subplots()
    heights = [math.log2(c.ratio) for c in shown]
    axis.barh(range(len(shown)), heights, color=[_color(c) for c in shown], zorder=2)
    low, high = min(0.0, *heights), max(0.0, *heights)
    room = max(0.1, 0.12 * (high - low))  # for the figures beside the bars
    axis.set_xlim(low - room, high + room)
    for place, (c, height) in enumerate(zip(shown, heights, strict=True)):
        axis.annotate(
            f"{c.ratio:.3g}",
            (height, place),
            textcoords="offset points",
            xytext=(4 if height >= 0 else -4, 0),
            ha="left" if height >= 0 else "right",
            va="center",
            fontsize=8,
        )
    texts = [f"{c.name} ({'more' if c.higher_is_better else 'less'} is better)" for c in shown]
    axis.set_yticks(range(len(shown)), texts, fontsize=8)
    axis.set_ylim(len(shown) - 0.4, -0.6)  # from the top to the bottom
    axis.axvline(0, color="#404040", linewidth=1, zorder=3)
    ticks = _ticks(low - room, high + room)
    axis.set_xticks([math.log2(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axis.set_xlabel("B / A (green: B is better, red: worse)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", color="#e4e4e4", zorder=0)
    title = _title([*labels, f"A: {names[0]}", f"B: {names[1]}"], changes, len(found) - len(shown))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(file, format="png")


def _ticks(low: float, high: float) -> list[float]:
    """Round quotients between 2**low and 2**high, 1 included, with room for their texts."""
    found: list[float] = []
    for tick in sorted((*_ABOVE, *_BELOW), key=lambda tick: abs(math.log2(tick))):
        at = math.log2(tick)
        if low <= at <= high and all(abs(at - math.log2(other)) > (high - low) / 16 for other in found):
            found.append(tick)
    return sorted(found)


def _color(comparison: Comparison) -> str:
    if 1 / _NOISE < comparison.gain < _NOISE:
        return _SAME
    return _BETTER if comparison.gain > 1 else _WORSE


def _title(lines: list[str], changes: Mapping[str, Any], left_out: int) -> str:
    if changes:
        lines += textwrap.wrap("differs: " + ", ".join(name.rpartition(".")[2] for name in changes), 120, max_lines=2)
    if left_out:
        lines.append(f"{left_out} figures more are in the table")
    return "\n".join(lines)
