"""The table of a result of `outrider bench lora`, and its picture: throughput, TTFT and ITL by number of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...text_tables import aligned
from ..machine import headline
from ..pictures import BLUE, GREEN, GREY, RED, SAND, add_legend, panels, save
from ..popularity import DISTINCT, IDENTICAL, SKEWED, UNIFORM

_NOTES = """\
adapters: that requests may ask for; base: an engine that takes none; 0: the base model in an engine that does.
in a run: different adapters asked for in one run, mean. of base: output tokens/s over those of the base engine in the
same round, median of the rounds; of one: the same over the case with one adapter. TTFT and ITL: median and 99th
percentile; TPOT: mean without the first token."""
_COLORS = {"": "#202020", IDENTICAL: BLUE, UNIFORM: GREEN, SKEWED: SAND, DISTINCT: RED}
_PANELS = {None: "output tokens/s over base", "ttft_ms": "TTFT, ms", "itl_ms": "ITL, ms"}


def sizes(report: dict[str, Any]) -> str:
    """The sizes of the measurement in a line."""
    settings = report["settings"]
    return (
        f"prompts of {settings['input_len']} tokens, {settings['output_len']} tokens of output; ranks "
        f"{','.join(map(str, settings['ranks']))}; max_loras {settings['max_loras']}, max_cpu_loras "
        f"{settings['max_cpu_loras']}; medians of {settings['rounds']} rounds"
    )


def format_table(report: dict[str, Any]) -> str:
    """The report as plain text: labels first, a table a batch size, the cold adapters, memory."""
    lines = [*report["labels"], headline(report), sizes(report)]
    for batch_size in dict.fromkeys(row["batch_size"] for row in report["rows"]):
        rows = [_cells(row) for row in report["rows"] if row["batch_size"] == batch_size]
        lines += ["", f"requests at once: {batch_size}", *aligned(rows, left=("popularity",))]
    lines += ["", _NOTES]
    if report["cold"] is not None:
        lines += ["", *_cold_lines(report["cold"])]
    adapters = report["adapters"]
    levels = ", ".join(f"{number} on {name}" for name, number in adapters["adapters_by_level"].items())
    memory = ", ".join(f"{name} {mib:.0f}" for name, mib in report["peak_memory_mib"].items())
    registered = f"{adapters['registered']} adapters registered in {adapters['seconds_to_register']:.1f} s"
    return "\n".join([*lines, "", f"{registered}; in the end: {levels}", f"peak of resident memory, MiB: {memory}"])


def _cells(row: dict[str, Any]) -> dict[str, str]:
    def optional(values: dict[str, Any] | None, name: str, digits: int) -> str:
        return "" if values is None or values.get(name) is None else f"{values[name]:.{digits}f}"

    return {
        "adapters": "base" if row["num_adapters"] is None else str(row["num_adapters"]),
        "popularity": row["popularity"],
        "in a run": f"{row['distinct_adapters']:g}",
        "tokens/s": f"{row['output_throughput']:.1f}",
        "of base": optional(row, "ratio", 3),
        "of one": optional(row, "ratio_to_one_adapter", 3),
        "TTFT ms": optional(row["ttft_ms"], "median", 1),
        "TTFT p99": optional(row["ttft_ms"], "p99", 1),
        "TPOT ms": optional(row["tpot_ms"], "mean", 2),
        "ITL ms": optional(row["itl_ms"], "median", 2),
        "ITL p99": optional(row["itl_ms"], "p99", 2),
    }


def _cold_lines(cold: dict[str, Any]) -> list[str]:
    rows = []
    for name, kind in cold["kinds"].items():
        ttft, load = kind["stream_ttft_ms"], kind["load_ms"]
        rows.append(
            {
                "alongside warm requests": name,
                "ITL ms": f"{kind['itl_ms']['median']:.2f}",
                "p99": f"{kind['itl_ms']['p99']:.2f}",
                "TTFT of the stream": f"{ttft['median']:.1f}" if ttft else "",
                "load ms": f"{load['median']:.1f}" if load else "",
                "loads": str(sum(entry["loads"] for entry in kind["rounds"])),
            }
        )
    return [
        f"{cold['warm_requests']} warm requests concurrent with a stream of {cold['cold_adapters']} short requests, "
        f"{cold['cold_rate']:g} a second, each for another adapter that must be loaded, or for loaded ones",
        *aligned(rows, left=("alongside warm requests",)),
        f"ITL p99 while cold adapters load, median of the rounds: {cold['itl_p99_ratio']:.2f} of that without loading, "
        f"{cold['itl_p99_ratio_to_quiet']:.2f} of that without a stream",
    ]


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw a column of panels for each batch size, and one for the cold adapters."""
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in report["rows"]))
    cold = report["cold"]
    columns = len(batch_sizes) + (cold is not None)
    title = [
        *report["labels"],
        f"LoRA serving: {headline(report)}",
        f"{sizes(report)}. Circles are medians, triangles 99th percentiles.",
    ]
    figure, axes = panels(title, 3, columns, (max(7.0, 4.3 * columns), 11))
    for column, batch_size in enumerate(batch_sizes):
        rows = [row for row in report["rows"] if row["batch_size"] == batch_size]
        for axis, (metric, label) in zip(axes[:, column], _PANELS.items(), strict=True):
            _draw_panel(axis, rows, metric)
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
        axes[0][column].set_title(f"{batch_size} at once", fontsize=11, loc="left", fontweight="bold")
        axes[2][column].set_xlabel("adapters")
    if cold is not None:
        _draw_cold(axes[:, -1], cold)
    add_legend(figure, axes[0][0], columns=4)
    save(figure, file)


def _draw_panel(axis: Any, rows: Sequence[dict[str, Any]], metric: str | None) -> None:
    """Draw one figure of one batch size; x is the number of adapters, evenly spaced."""
    numbers = sorted({row["num_adapters"] for row in rows if row["num_adapters"] is not None})
    base = next(row for row in rows if row["num_adapters"] is None)
    level = 1.0 if metric is None else base[metric] and base[metric]["median"]
    if level is not None:
        axis.axhline(level, color=GREY, linestyle="--", label="base: an engine that takes no adapters")
    present = {row["popularity"] for row in rows}
    if present & set(_COLORS) - {"", IDENTICAL}:
        present.discard(IDENTICAL)  # a single adapter is the first point of each line
    for popularity in sorted(present):
        color = _COLORS[popularity]
        line = [r for r in rows if r["popularity"] == popularity or (popularity and r["num_adapters"] == 1)]
        line = [r for r in line if r is not base and (metric is None or r[metric])]
        if line:
            xs = [numbers.index(row["num_adapters"]) for row in line]
            ys = [row["ratio"] if metric is None else row[metric]["median"] for row in line]
            label = popularity or "base model, in an engine with adapters"
            axis.plot(xs, ys, marker="o", color=color, label=label)
            if metric is not None:
                axis.plot(xs, [row[metric]["p99"] for row in line], "^", color=color, alpha=0.55)
    axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])


def _draw_cold(axes: Sequence[Any], cold: dict[str, Any]) -> None:
    """Draw the warm requests' ITL p99 (dots: each round) and the stream's TTFT by the kind of stream."""
    axes[0].set_title("while adapters stream in", fontsize=11, loc="left", fontweight="bold")
    for axis, metric, share in ((axes[0], "itl_ms", "p99"), (axes[1], "stream_ttft_ms", "median")):
        found = {name.replace(" ", "\n", 1): kind for name, kind in cold["kinds"].items() if kind[metric]}
        bars = axis.bar(list(found), [kind[metric][share] for kind in found.values()], color=BLUE)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_ylabel("ITL p99 of warm requests, ms" if metric == "itl_ms" else "TTFT of the stream, ms")
    for x, kind in enumerate(cold["kinds"].values()):
        axes[0].plot([x] * len(kind["rounds"]), [entry["itl_ms"]["p99"] for entry in kind["rounds"]], "k.")
    axes[2].axis("off")
    axes[2].text(
        0,
        0.95,
        f"{cold['warm_requests']} warm requests; {cold['cold_adapters']} short ones,\n{cold['cold_rate']:g} a second, "
        "arrive concurrently.\n\nITL p99 while cold adapters load, median of rounds:\n"
        f"{cold['itl_p99_ratio']:.2f} of that without loading\n"
        f"{cold['itl_p99_ratio_to_quiet']:.2f} of that without a stream",
        va="top",
        transform=axes[2].transAxes,
    )
