"""A result for people (a table) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .modes import ADAPTIVE
from .workload import WITH_DRAFT, WITHOUT_DRAFT

_COLUMNS = (
    ("text", 12),
    ("draft weights", 14),
    ("mode", 20),
    ("tokens/s", 9),
    ("speed-up", 9),
    ("+-", 5),
    ("CPU", 5),
    ("TTFT ms", 9),
    ("TPOT ms", 9),
    ("p99 ITL", 9),
    ("length", 7),
    ("rate", 6),
    ("by position", 26),
    ("ach/limit", 10),
    ("same text", 10),
)
_LEFT = {"text", "draft weights", "mode"}
_NOTES = """\
speed-up: output tokens/s over off, median of the rounds; +-: its standard error. CPU: the same by the time that the
processor took for a token, where it computes the steps: free of what other processes take. TTFT, TPOT: means; TPOT
leaves out the first token.
length: tokens a verification gives (drafts accepted, and one). rate: drafts accepted. by position: share of the
verifications that accept the draft there. ach/limit: decoding's speed-up over the most that these drafts allow.
same text: requests with off's tokens, over all rounds."""


def labels(*, synthetic: Sequence[float] | None, random_weights: bool) -> list[str]:
    """What makes the figures no real ones, if anything does: the first line of every output."""
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
    tried = settings.get("tokens_per_second_in_trial")
    if tried:
        speeds = ", ".join(f"{method} {speed:g}" for method, speed in tried.items())
        lines.append(f"{ADAPTIVE} drafts with {max(tried, key=tried.get)}; tokens/s in a trial before: {speeds}")
    if model.get("inflated_from"):
        lines.append(f"inflated from {model['inflated_from']}: the same function at the cost of this size")
    for batch_size in dict.fromkeys(row["batch_size"] for row in report["rows"]):
        lines += ["", f"batch size {batch_size}", _line([name for name, _ in _COLUMNS])]
        lines += [_line(_cells(row)) for row in report["rows"] if row["batch_size"] == batch_size]
    return "\n".join([*lines, "", _NOTES])


def _line(cells: Sequence[str]) -> str:
    parts = [
        cell.ljust(width) if name in _LEFT else cell.rjust(width)
        for cell, (name, width) in zip(cells, _COLUMNS, strict=True)
    ]
    return " ".join(parts).rstrip()


def _cells(row: dict[str, Any]) -> list[str]:
    limit, same = row.get("limit"), row["same_text_as_off"]
    tpot, itl = row["tpot_ms"], row["itl_ms"]
    return [
        row["task"],
        {WITH_DRAFT: "with", WITHOUT_DRAFT: "without"}.get(row["kind"], ""),
        row["mode"],
        f"{row['output_throughput']:.1f}",
        f"{row['speedup']:.2f}",
        "" if row["speedup_error"] is None else f"{row['speedup_error']:.2f}",
        f"{row['cpu_speedup']:.2f}" if "cpu_speedup" in row else "",
        f"{row['ttft_ms']['mean']:.1f}",
        f"{tpot['mean']:.2f}" if tpot else "",
        f"{itl['p99']:.1f}" if itl else "",
        f"{row['acceptance_length']:.2f}" if row["acceptance_length"] is not None else "",
        f"{row['acceptance_rate']:.2f}" if row["acceptance_rate"] is not None else "",
        " ".join(f"{share:.2f}" for share in row["acceptance_per_position"][:5]),
        f"{limit['achieved_over_limit']:.2f}" if limit else "",
        f"{same['same']}/{same['of']}",
    ]
