"""Pictures of results: what all of them share. matplotlib is imported when something is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import InvalidRequestError

BLUE, GREEN, RED, SAND, GREY = "#3b6ea5", "#3f9b6d", "#a03030", "#c9a25a", "#9aa0a6"


def can_draw() -> bool:
    """True when matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_can_draw() -> None:
    """Raise InvalidRequestError unless matplotlib is installed: better before the measurement than after it."""
    if not can_draw():
        raise InvalidRequestError("needs matplotlib: pip install 'outrider[bench]'", param="plot")


def panels(title: Sequence[str], rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure with lines of title, and its axes as an array [rows, columns]; `options` as in Figure.subplots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    figure.suptitle("\n".join(title), fontsize=11, x=0.01, ha="left", wrap=True)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.grid(axis="y", color="#e4e4e4")
    return figure, axes


def add_legend(figure: Any, axis: Any, columns: int = 2) -> None:
    """Add the legend of one axis below the figure."""
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def save(figure: Any, file: Path) -> None:
    """Write the figure as a PNG, whatever the file is called."""
    figure.savefig(file, format="png")
