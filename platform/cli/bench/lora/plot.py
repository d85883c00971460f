"""One picture of a result: throughput, TTFT and ITL by the number of adapters, and ITL beside a stream of new ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import DISTINCT, IDENTICAL, SKEWED, UNIFORM
from .report import describe

_COLORS = {IDENTICAL: "#3b6ea5", UNIFORM: "#3f9b6d", SKEWED: "#c9a25a", DISTINCT: "#a03030"}
_DASHES = ("-", "--", ":", "-.")
_APART = 0.09
"""Offset between the points of two popularities at one number of adapters."""
_KINDS = ("#b8c4d0", "#3b6ea5", "#a03030")


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the picture as a PNG: a column for each batch size, and one for the cold adapters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in report["rows"]))
    cold = report["cold"]
    columns = max(1, len(batch_sizes) + (cold is not None))
    figure = Figure(figsize=(max(7.0, 4.3 * columns), 11), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, columns, squeeze=False)
    for column, batch_size in enumerate(batch_sizes):
        panel = [row for row in report["rows"] if row["batch_size"] == batch_size]
        title = f"{batch_size} request{'s' if batch_size > 1 else ''} at once"
        axes[0][column].set_title(title, fontsize=11, loc="left", fontweight="bold")
        _draw_column(axes[:, column].tolist(), panel)
    _align(axes[0][: len(batch_sizes)])
    for axis, text in zip(axes[:, 0], ("output tokens/s over base", "TTFT, ms", "ITL, ms"), strict=True):
        axis.set_ylabel(text)
    if cold is not None:
        _draw_cold(axes[:, -1].tolist(), cold)
    if batch_sizes:
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False, fontsize=9)
    figure.suptitle(_title(report), fontsize=12, x=0.01, ha="left", wrap=True)
    figure.savefig(file, format="png")


def _title(report: dict[str, Any]) -> str:
    settings, memory = report["settings"], report["memory_mib"].get("measured", {})
    notes = (
        f"prompts of {settings['input_len']} tokens, {settings['output_len']} of output; max_loras "
        f"{settings['max_loras']}, max_cpu_loras {settings['max_cpu_loras']}; medians of {settings['rounds']} rounds"
    )
    notes += "\nTTFT and ITL: circles are medians, triangles 99th percentiles"
    if memory:
        notes += f"; resident memory at most {memory['peak']:.0f} MiB"
    return "\n".join([*report["labels"], f"LoRA serving: {describe(report)}", notes])


def _draw_column(axes: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Draw throughput, TTFT and ITL of one batch size; x is the number of adapters, evenly spaced."""
    numbers = sorted({row["num_adapters"] for row in rows if row["num_adapters"] is not None})
    places = {number: place for place, number in enumerate(numbers)}
    base = next((row for row in rows if row["num_adapters"] is None), None)
    mixes = list(dict.fromkeys(tuple(row["ranks"]) for row in rows if row["ranks"]))
    present = [popularity for popularity in _COLORS if any(row["popularity"] == popularity for row in rows)]
    for place, (axis, name) in enumerate(zip(axes, (None, "ttft_ms", "itl_ms"), strict=True)):
        for mix in mixes:
            for popularity, color in _COLORS.items():
                if popularity not in present:
                    continue
                line = [
                    row
                    for row in rows
                    if tuple(row["ranks"]) == mix and (row["popularity"] == popularity or row["num_adapters"] == 1)
                ]
                shift = (present.index(popularity) - (len(present) - 1) / 2) * _APART
                label = popularity + (f", ranks {','.join(map(str, mix))}" if len(mixes) > 1 else "")
                style = {"color": color, "linestyle": _DASHES[mixes.index(mix) % len(_DASHES)], "marker": "o"}
                _draw_line(axis, name, [(places[row["num_adapters"]] + shift, row) for row in line], label, style)
        none = [(places[0], row) for row in rows if row["num_adapters"] == 0]
        _draw_line(axis, name, none, "base model, in an engine with adapters", {"color": "#202020", "marker": "D"})
        _draw_base(axis, name, base)
        axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        axis.set_xlim(-0.4, len(numbers) - 0.6)
        _tidy(axis)
        if place == 2:
            axis.set_xlabel("adapters")
        if name is not None:
            axis.set_ylim(bottom=0)


def _draw_line(axis: Any, name: str | None, points: Sequence[Any], label: str, style: dict[str, Any]) -> None:
    """Draw medians as a line, and the 99th percentiles of a latency as triangles."""
    xs = [x for x, row in points if name is None or row[name]]
    found = [row for _, row in points if name is None or row[name]]
    if not found:
        return
    ys = [row["ratio"] if name is None else row[name]["median"] for row in found]
    axis.plot(xs, ys, linewidth=1.6, markersize=4.5, label=label, **style)
    if name is not None:
        axis.plot(xs, [row[name]["p99"] for row in found], "^", color=style["color"], markersize=4, alpha=0.55)


def _draw_base(axis: Any, name: str | None, base: dict[str, Any] | None) -> None:
    level = 1.0 if name is None else (base[name]["median"] if base is not None and base[name] else None)
    if level is not None:
        label = "base: an engine that takes no adapters"
        axis.axhline(level, color="#808080", linewidth=1.2, linestyle="--", zorder=1, label=label)


def _align(axes: Sequence[Any]) -> None:
    """Set one scale of ratios that begins at 0, so that a cost looks as large as it is."""
    top = max([1.05, *(axis.get_ylim()[1] for axis in axes)])
    for axis in axes:
        axis.set_ylim(0, top * 1.03)


def _draw_cold(axes: Sequence[Any], cold: dict[str, Any]) -> None:
    """Draw bars of the warm requests' ITL p99 and of the stream's TTFT, with their legend."""
    names, kinds = list(cold["kinds"]), list(cold["kinds"].values())
    words = [name.replace(" adapters stream in", "\nadapters") for name in names]
    axes[0].set_title("while adapters stream in", fontsize=11, loc="left", fontweight="bold")
    heights = [kind["itl_ms"]["p99"] for kind in kinds]
    axes[0].bar(range(len(kinds)), heights, 0.6, color=_KINDS)
    for x, kind in enumerate(kinds):
        dots = [round_["itl_ms"]["p99"] for round_ in kind["rounds"]]
        axes[0].plot([x] * len(dots), dots, ".", color="#202020", markersize=4, alpha=0.7)
        top = max(heights[x], *dots)
        axes[0].annotate(f"{heights[x]:.1f}", (x, top), (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axes[0].set_ylabel("ITL p99 of warm requests, ms")
    ttft = [(words[x], kind["stream_ttft_ms"], _KINDS[x]) for x, kind in enumerate(kinds) if kind["stream_ttft_ms"]]
    axes[1].bar(range(len(ttft)), [values["median"] for _, values, _ in ttft], 0.6, color=[c for *_, c in ttft])
    axes[1].plot(range(len(ttft)), [values["p99"] for _, values, _ in ttft], "^", color="#202020", markersize=5)
    axes[1].set_ylabel("TTFT of the stream, ms (triangle: p99)")
    for axis, labels in ((axes[0], words), (axes[1], [word for word, *_ in ttft])):
        axis.set_xticks(range(len(labels)), labels, fontsize=9)
        _tidy(axis)
    axes[2].axis("off")
    text = (
        f"{cold['warm_requests']} warm requests; {cold['cold_adapters']} short ones,\n{cold['cold_rate']:g} a second, "
        "stream in beside them.\n\nITL p99 while cold adapters load:\n"
        f"{cold['itl_p99_ratio']:.2f} of that without loading\n"
        f"{cold['itl_p99_ratio_to_quiet']:.2f} of that without a stream\n\n(medians of rounds; bars: all rounds,\n"
        "dots: each)"
    )
    axes[2].text(0, 0.95, text, va="top", fontsize=10, transform=axes[2].transAxes)


def _tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e4e4e4", zorder=0)
    axis.set_axisbelow(True)
