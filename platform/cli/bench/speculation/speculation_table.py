"""The table of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .tasks import WITH_DRAFT, WITHOUT_DRAFT


def _optional(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_WEIGHTS = {WITH_DRAFT: "with", WITHOUT_DRAFT: "without"}
_COLUMNS: tuple[tuple[str, int, Callable[[dict[str, Any]], str]], ...] = (
    ("text", -12, lambda row: row["task"]),
    ("draft weights", -14, lambda row: _WEIGHTS.get(row["kind"], "")),
    ("mode", -20, lambda row: row["mode"]),
    ("tokens/s", 9, lambda row: f"{row['output_throughput']:.1f}"),
    ("speed-up", 9, lambda row: f"{row['speedup']:.2f}"),
    ("+-", 5, lambda row: _optional(row["speedup_error"], 2)),
    ("CPU", 5, lambda row: _optional(row["cpu_speedup"], 2)),
    ("TTFT ms", 9, lambda row: f"{row['ttft_ms']['mean']:.1f}"),
    ("TPOT ms", 9, lambda row: _optional((row["tpot_ms"] or {}).get("mean"), 2)),
    ("p99 ITL", 9, lambda row: _optional((row["itl_ms"] or {}).get("p99"), 1)),
    ("length", 7, lambda row: _optional(row["acceptance_length"], 2)),
    ("rate", 6, lambda row: _optional(row["acceptance_rate"], 2)),
    ("by position", 26, lambda row: " ".join(f"{share:.2f}" for share in row["acceptance_per_position"][:5])),
    ("same text", 10, lambda row: f"{row['same_text_as_off']['same']}/{row['same_text_as_off']['of']}"),
)
"""Heading, width (negative: aligned to the left) and cell of a row."""
_NOTES = """\
speed-up: output tokens/s over off, median of the rounds; +-: its standard error. CPU: the speed-up by processor time of
the computing thread, which other processes disturb less. TTFT, TPOT: means; TPOT leaves out the first token. length:
tokens a verification gives (accepted drafts, and one). rate: share of accepted drafts. by position: share of the
verifications that accept the draft there. same text: requests with off's tokens, all rounds."""


def labels(*, synthetic: Sequence[float] | None, random_weights: bool) -> list[str]:
    """Warnings that text or acceptance are not real: the first lines of every output."""
    found = []
    if synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in synthetic)
        found.append(f"SYNTHETIC ACCEPTANCE ({rates}): drafts are accepted whatever they are; the text is meaningless")
    if random_weights:
        found.append("RANDOM WEIGHTS: text and acceptance are meaningless")
    return found


def format_table(report: dict[str, Any]) -> str:
    """The report as plain text: labels first, then one table a batch size."""
    lines = list(report["labels"])
    model, machine, settings = report["model"], report["machine"], report["settings"]
    lines.append(
        f"{model['name']}, {model['num_parameters'] / 1e6:.3g}M parameters, {model['dtype']}, on "
        f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}; {settings['num_speculative_tokens']} "
        f"drafts a step, median of {settings['rounds']} rounds"
    )
    if model.get("inflated_from"):
        lines.append(f"inflated from {model['inflated_from']}: the same function at the cost of this size")
    for batch_size in dict.fromkeys(row["batch_size"] for row in report["rows"]):
        lines += ["", f"batch size {batch_size}", _line([name for name, _, _ in _COLUMNS])]
        rows = [row for row in report["rows"] if row["batch_size"] == batch_size]
        lines += [_line([cell(row) for _, _, cell in _COLUMNS]) for row in rows]
    return "\n".join([*lines, "", _NOTES])


def _line(cells: Sequence[str]) -> str:
    widths = [width for _, width, _ in _COLUMNS]
    aligned = (cell.rjust(w) if w > 0 else cell.ljust(-w) for cell, w in zip(cells, widths, strict=True))
    return " ".join(aligned).rstrip()
