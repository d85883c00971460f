"""The table of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_COLUMNS = (
    ("adapters", 9),
    ("popularity", 11),
    ("ranks", 10),
    ("in a run", 9),
    ("tokens/s", 10),
    ("of base", 8),
    ("of one", 7),
    ("TTFT ms", 9),
    ("p99", 9),
    ("TPOT ms", 8),
    ("ITL ms", 8),
    ("p99", 8),
    ("rounds", 7),
)
_LEFT = {"popularity", "ranks"}
_NOTES = """\
adapters: that requests may ask for; base: an engine that takes none; 0: the base model in an engine that does.
in a run: different adapters asked for in one run, mean. of base: output tokens/s over those of the base engine's run
beside it, median of the rounds; of one: the same over the case with one adapter. TTFT and ITL: median and 99th
percentile; TPOT: mean without the first token."""


def labels(*, random_weights: bool, random_adapters: bool, stopped_by: str | None) -> list[str]:
    """Warnings that text is not real or rounds are missing: the first lines of every output."""
    found = []
    if random_weights:
        found.append("RANDOM WEIGHTS: the text is meaningless")
    elif random_adapters:
        found.append("RANDOM ADAPTERS: the text is meaningless")
    if stopped_by is not None:
        found.append(f"INCOMPLETE ({stopped_by}): some rounds are missing")
    return found


def describe(report: dict[str, Any]) -> str:
    """Line with the model and the machine."""
    model, machine = report["model"], report["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    return (
        f"{model.get('name')}, {model.get('num_parameters', 0) / 1e6:.3g}M parameters, {model.get('dtype')}, on {where}"
    )


def format_table(report: dict[str, Any]) -> str:
    """The report as plain text: labels first, a table a batch size, the cold adapters, memory."""
    settings = report["settings"]
    lines = [*report["labels"], describe(report)]
    lines.append(
        f"prompts of {settings['input_len']} tokens, {settings['output_len']} tokens of output; max_loras "
        f"{settings['max_loras']}, max_cpu_loras {settings['max_cpu_loras']}; median of {settings['rounds']} rounds"
    )
    for batch_size in dict.fromkeys(row["batch_size"] for row in report["rows"]):
        lines += ["", f"requests at once: {batch_size}", _line([name for name, _ in _COLUMNS])]
        lines += [_line(_cells(row)) for row in report["rows"] if row["batch_size"] == batch_size]
    if report["rows"]:
        lines += ["", _NOTES]
    if report["cold"] is not None:
        lines += ["", *_cold_lines(report["cold"])]
    lines += ["", *_memory_lines(report)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    parts = [
        cell.ljust(width) if name in _LEFT else cell.rjust(width)
        for cell, (name, width) in zip(cells, _COLUMNS, strict=True)
    ]
    return " ".join(parts).rstrip()


def _cells(row: dict[str, Any]) -> list[str]:
    tpot, itl = row["tpot_ms"], row["itl_ms"]
    to_one = row.get("ratio_to_one_adapter")
    return [
        "base" if row["num_adapters"] is None else str(row["num_adapters"]),
        row["popularity"],
        ",".join(map(str, row["ranks"])),
        f"{row['distinct_adapters']:g}",
        f"{row['output_throughput']:.1f}",
        f"{row['ratio']:.3f}" if "ratio" in row else "",
        f"{to_one:.3f}" if to_one is not None else "",
        f"{row['ttft_ms']['median']:.1f}",
        f"{row['ttft_ms']['p99']:.1f}",
        f"{tpot['mean']:.2f}" if tpot else "",
        f"{itl['median']:.2f}" if itl else "",
        f"{itl['p99']:.2f}" if itl else "",
        str(len(row["rounds"])),
    ]


def _cold_lines(cold: dict[str, Any]) -> list[str]:
    lines = [
        f"{cold['warm_requests']} warm requests beside a stream of {cold['cold_adapters']} short requests, "
        f"{cold['cold_rate']:g} a second, each for another adapter that must be loaded, or for loaded ones",
        f"{'':28}{'ITL ms':>9}{'p99':>9}{'TTFT of the stream':>20}{'p99':>9}{'load ms':>9}{'loads':>7}",
    ]
    for name, kind in cold["kinds"].items():
        ttft, load = kind["stream_ttft_ms"], kind["load_ms"]
        lines.append(
            f"{name:28}{kind['itl_ms']['median']:9.2f}{kind['itl_ms']['p99']:9.2f}"
            + (f"{ttft['median']:20.1f}{ttft['p99']:9.1f}" if ttft else f"{'':29}")
            + (f"{load['median']:9.1f}{sum(r['loads'] for r in kind['rounds']):7}" if load else "")
        )
    return [
        *(line.rstrip() for line in lines),
        f"ITL p99 while cold adapters load, median of the rounds: {cold['itl_p99_ratio']:.2f} of that without loading, "
        f"{cold['itl_p99_ratio_to_quiet']:.2f} of that without a stream",
    ]


def _memory_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    adapters = report["adapters"]
    if "registered" in adapters:
        levels = ", ".join(f"{number} on {name}" for name, number in adapters.get("adapters_by_level", {}).items())
        lines.append(
            f"{adapters['registered']} adapters registered in {adapters['seconds_to_register']:.1f} s"
            + (f"; in the end: {levels}" if levels else "")
        )
    memory = [f"{name} {values.get('resident', values['peak']):.0f}" for name, values in report["memory_mib"].items()]
    peak = report["memory_mib"].get("measured", {}).get("peak")
    if memory:
        more = f"; peak since the engines were loaded {peak:.0f}" if peak is not None else ""
        lines.append(f"resident memory, MiB: {', '.join(memory)}{more}")
    return lines
