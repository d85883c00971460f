"""The table of a result of `outrider bench lora`."""

from __future__ import annotations

from typing import Any

from ...text_tables import aligned
from ..machine import headline

_NOTES = """\
adapters: that requests may ask for; base: an engine that takes none; 0: the base model in an engine that does.
in a run: different adapters asked for in one run, mean. of base: output tokens/s over those of the base engine in the
same round, median of the rounds; of one: the same over the case with one adapter. TTFT and ITL: median and 99th
percentile; TPOT: mean without the first token."""


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
                "beside the warm requests": name,
                "ITL ms": f"{kind['itl_ms']['median']:.2f}",
                "p99": f"{kind['itl_ms']['p99']:.2f}",
                "TTFT of the stream": f"{ttft['median']:.1f}" if ttft else "",
                "load ms": f"{load['median']:.1f}" if load else "",
                "loads": str(sum(entry["loads"] for entry in kind["rounds"])),
            }
        )
    return [
        f"{cold['warm_requests']} warm requests beside a stream of {cold['cold_adapters']} short requests, "
        f"{cold['cold_rate']:g} a second, each for another adapter that must be loaded, or for loaded ones",
        *aligned(rows, left=("beside the warm requests",)),
        f"ITL p99 while cold adapters load, median of the rounds: {cold['itl_p99_ratio']:.2f} of that without loading, "
        f"{cold['itl_p99_ratio_to_quiet']:.2f} of that without a stream",
    ]
