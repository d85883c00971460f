"""The table and the picture of a result of `outrider bench speculation`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...text_tables import aligned
from ..machine import headline
from ..pictures import BLUE, GREEN, RED, SAND, add_legend, panels, save
from .modes import OFF, is_adaptive
from .tasks import PLAIN, RANDOM_TEXT, WITH_DRAFT, WITHOUT_DRAFT

_WEIGHTS = {WITH_DRAFT: "with", WITHOUT_DRAFT: "without"}
_NOTES = """\
speed-up: output tokens/s over off, median of the rounds; +-: its standard error. CPU: the speed-up by processor time of
the computing thread, which other processes disturb less. of oracle: the speed-up over that of drafts that are always
right. TTFT, TPOT: means; TPOT leaves out the first token. a step: tokens a sampling step gives, also those without
drafts, so that all rows can be compared. length: tokens a verification gives (accepted drafts, and one). rate: share of
accepted drafts. by position: share of the verifications that accept the draft there. made by: share of the tokens that
come from steps without drafts (off) and from those with each drafter's. same text: requests with off's tokens, all
rounds."""
_SERIES = {
    PLAIN: ("base model", BLUE),
    WITH_DRAFT: ("adapters, with their draft weights", GREEN),
    WITHOUT_DRAFT: ("adapters, drafter without draft weights", "#b7d7c2"),
    RANDOM_TEXT: ("base model on random text", SAND),
}
"""Label and colour by the kind of a row."""
_GROUP_WIDTH = 0.84
_ERROR = {"elinewidth": 1.0, "ecolor": "#444444"}


def format_table(report: dict[str, Any]) -> str:
    """The report as plain text: labels first, then one table a batch size."""
    settings = report["settings"]
    lines = [*report["labels"], headline(report)]
    lines.append(f"{settings['num_speculative_tokens']} drafts a step, median of {settings['rounds']} rounds")
    for batch_size in dict.fromkeys(row["batch_size"] for row in report["rows"]):
        rows = [_cells(row) for row in report["rows"] if row["batch_size"] == batch_size]
        lines += ["", f"batch size {batch_size}", *aligned(rows, left=("text", "draft weights", "mode"))]
    return "\n".join([*lines, "", _NOTES])


def _cells(row: dict[str, Any]) -> dict[str, str]:
    def optional(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return {
        "text": row["task"],
        "draft weights": _WEIGHTS.get(row["kind"], ""),
        "mode": row["mode"],
        "tokens/s": f"{row['output_throughput']:.1f}",
        "speed-up": f"{row['speedup']:.2f}",
        "+-": optional(row["speedup_error"]),
        "CPU": optional(row["cpu_speedup"]),
        "of oracle": optional(row.get("of_oracle")),
        "TTFT ms": f"{row['ttft_ms']['mean']:.1f}",
        "TPOT ms": optional((row["tpot_ms"] or {}).get("mean")),
        "p99 ITL": optional((row["itl_ms"] or {}).get("p99"), 1),
        "a step": optional(row["tokens_per_step"]),
        "length": optional(row["acceptance_length"]),
        "rate": optional(row["acceptance_rate"]),
        "by position": " ".join(f"{share:.2f}" for share in row["acceptance_per_position"][:5]),
        "made by": _made_by(row["tokens_by_drafter"]) if is_adaptive(row["mode"]) else "",
        "same text": f"{row['same_text_as_off']['same']}/{row['same_text_as_off']['of']}",
    }


def _made_by(shares: dict[str, float]) -> str:
    """Shares as "eagle3 71% off 29%", the largest first."""
    return " ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda pair: -pair[1]))


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw the speed-up of every mode, a panel for each batch size. Bars are means over the adapters; at the foot of
    each stands its acceptance length."""
    rows = [row for row in report["rows"] if row["mode"] != OFF]
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    kinds = [kind for kind in _SERIES if any(row["kind"] == kind for row in rows)]
    title = [
        *report["labels"],
        f"Speculative decoding: {headline(report)}",
        f"{report['settings']['num_speculative_tokens']} drafts; bar: speed-up, median of rounds (mean of adapters), "
        "and its standard error; at its foot: acceptance length",
    ]
    count = max(1, len(batch_sizes))
    size = (max(7.0, 1.2 + 0.34 * len(modes) * len(kinds)), 3.7 * count + 1.5)
    figure, axes = panels(title, count, 1, size, sharey=True)
    for axis, batch_size in zip(axes[:, 0], batch_sizes, strict=False):
        _draw_panel(axis, [row for row in rows if row["batch_size"] == batch_size], modes, kinds)
        axis.set_title(f"batch size {batch_size}", fontsize=11, loc="left", fontweight="bold")
        axis.set_ylabel("speed-up over no speculation")
    add_legend(figure, axes[0][0])
    save(figure, file)


def _error_of_mean(errors: Sequence[float]) -> float:
    """Standard error of the mean of independent figures with these errors."""
    return math.sqrt(sum(error * error for error in errors)) / len(errors)


def _draw_panel(axis: Any, rows: Sequence[dict[str, Any]], modes: Sequence[str], kinds: Sequence[str]) -> None:
    width = _GROUP_WIDTH / max(1, len(kinds))
    for place, kind in enumerate(kinds):
        found = {mode: [row for row in rows if (row["mode"], row["kind"]) == (mode, kind)] for mode in modes}
        shown = {modes.index(mode): mine for mode, mine in found.items() if mine}
        centers = [x + (place - (len(kinds) - 1) / 2) * width for x in shown]
        heights = [statistics.mean(row["speedup"] for row in mine) for mine in shown.values()]
        label, color = _SERIES[kind]
        errors = [_error_of_mean([row["speedup_error"] or 0.0 for row in mine]) for mine in shown.values()]
        bars = axis.bar(
            centers, heights, width * 0.92, yerr=errors, capsize=2, color=color, label=label, error_kw=_ERROR
        )
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        for center, mine in zip(centers, shown.values(), strict=True):
            lengths = [row["acceptance_length"] for row in mine if row["acceptance_length"] is not None]
            text = f"{statistics.mean(lengths):.1f}" if lengths else "–"
            axis.annotate(text, (center, 0), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axis.axhline(1.0, color=RED, linewidth=1.2, linestyle="--", label="no speculation")
    methods = {row["mode"]: row["method"] for row in rows}
    ticks = [f"adaptive\n({methods[mode]})" if is_adaptive(mode) else mode for mode in modes]
    axis.set_xticks(range(len(modes)), ticks, fontsize=9)
    axis.set_xlim(-0.6, len(modes) - 0.4)
