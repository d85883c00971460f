"""One picture of a comparison: for each model the rates of all engines, and below the ratios of Outrider's."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from .report import ADAPTIVE, NOTE, OURS, is_ours, present

_COLORS = {OURS: "#c8442f", ADAPTIVE: "#e39a6b", "vllm": "#3b6ea5", "transformers": "#c9a25a", "openvino": "#3f9b6d"}
_OTHERS = ("#7a5c99", "#808080", "#404040")
_WIDTH = 0.8
"""Width of all bars of one number of requests together."""


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the picture as a PNG: a column for each mode, two rows for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    medians, ratios = report["medians"], report["ratios"]
    models, modes = present(medians, "model"), present(medians, "mode")
    rows, columns = 2 * max(1, len(models)), max(1, len(modes))
    figure = Figure(figsize=(1.5 + 4.6 * columns, 1.6 + 2.9 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    colors = _palette(present(medians, "engine"))
    for i, model in enumerate(models):
        for j, mode in enumerate(modes):
            rates = [row for row in medians if (row["model"], row["mode"]) == (model, mode)]
            found = [row for row in ratios if (row["model"], row["mode"]) == (model, mode)]
            upper, lower = axes[2 * i][j], axes[2 * i + 1][j]
            upper.set_title(f"{model}, {mode}", fontsize=11, loc="left", fontweight="bold")
            _bars(upper, rates, "engine", "tokens_per_second", colors)
            _bars(lower, found, "peer", "ratio", colors)
            if found:
                lower.axhline(1, color="#202020", linewidth=1, linestyle="--", zorder=3)
                hatched = any(row["engine"] == ADAPTIVE for row in found)
                lower.set_ylabel("Outrider / peer" + (f" (hatched: {ADAPTIVE})" if hatched else ""), fontsize=9)
            upper.set_ylabel("output tokens/s (own scale each group)", fontsize=9)
    handles = [_patch(color) for color in colors.values()]
    figure.legend(handles, list(colors), loc="outside lower center", ncols=len(colors) or 1, frameon=False)
    figure.suptitle(_title(report, 30 + 40 * columns), fontsize=11, x=0.01, ha="left")
    figure.savefig(file, format="png")


def _palette(engines: list[str]) -> dict[str, str]:
    others = [engine for engine in engines if engine not in _COLORS]
    known = {engine: color for engine, color in _COLORS.items() if engine in engines}
    return known | {engine: _OTHERS[i % len(_OTHERS)] for i, engine in enumerate(others)}


def _patch(color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color)


def _bars(axis: Any, rows: list[dict[str, Any]], by: str, value: str, colors: dict[str, str]) -> None:
    """Draw a group of bars with figures for each number of requests; dots are the rounds. Rates span orders of
    magnitude, so each group is drawn relative to its highest; ratios share one scale."""
    axis.spines[["top", "right"]].set_visible(False)
    if not rows:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#808080")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    requests = sorted(present(rows, "requests"))
    is_rate = value == "tokens_per_second"
    found = {(row[by], row["engine"]) for row in rows}
    bars = sorted(found, key=lambda bar: (list(colors).index(bar[0]), bar[1]))
    width = _WIDTH / len(bars)
    for row in rows:
        x = requests.index(row["requests"]) + (bars.index((row[by], row["engine"])) - (len(bars) - 1) / 2) * width
        scale = _highest(rows, row["requests"], value) if is_rate else 1
        hatch = "///" if not is_rate and row["engine"] == ADAPTIVE else None
        axis.bar(x, row[value] / scale, width * 0.92, color=colors[row[by]], hatch=hatch, edgecolor="white", zorder=2)
        dots = [v / scale for v in row["rounds"]]
        axis.plot([x] * len(dots), dots, ".", color="#202020", markersize=3.5, alpha=0.6, zorder=4)
        style: dict[str, Any] = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}, "zorder": 3.5}
        style |= {"fontsize": 8 if len(bars) < 5 else 7, "fontweight": "bold" if is_ours(row[by]) else "normal"}
        place = (x, max(row[value] / scale, *dots))
        text = _figure(row[value], is_rate)
        axis.annotate(text, place, (0, 4), textcoords="offset points", ha="center", va="bottom", **style)
    axis.set_xticks(range(len(requests)), [f"{n} request{'s' if n > 1 else ''}" for n in requests], fontsize=9)
    axis.set_xlim(-0.5, len(requests) - 0.5)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
    if is_rate:
        axis.set_yticks([])


def _figure(value: float, is_rate: bool) -> str:
    if is_rate:
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:.2f}" if value < 9.95 else f"{value:.1f}"


def _highest(rows: list[dict[str, Any]], requests: int, value: str) -> float:
    return max(v for row in rows if row["requests"] == requests for v in (row[value], *row["rounds"]))


def _title(report: dict[str, Any], width: int) -> str:
    machine, settings = report["machine"], report["settings"]
    prompts = ", ".join(f"{size['requests']} × {size['prompt']}" for size in settings["sizes"])
    lines = [
        "INTERRUPTED: not everything was measured" if report.get("interrupted") else "",
        f"Engines side by side on {machine['cpu']}, {machine['cores']} cores, {machine['date']}",
        f"bfloat16, greedy; requests × prompt tokens: {prompts}; {settings['sizes'][0]['output']} output tokens each",
        f"medians of {settings['rounds']} interleaved rounds (dots); more is better; {NOTE}",
        *(f"not measured: {f['engine']} ({f['model']} {f['mode']}): {f['reason']}" for f in report["failures"][:4]),
    ]
    return "\n".join(textwrap.fill(textwrap.shorten(line, 2 * width), width) for line in lines if line)
