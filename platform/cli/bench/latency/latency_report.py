"""Table of `outrider bench latency`, as `vllm bench` prints it, and pictures of latencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench_options import METRICS
from ..pictures import add_legend, panels, save
from ..request_figures import RequestRecord, values

_WIDTH = 50
METRIC_NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_COUNTS = {
    "completed": "Requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total token throughput (tok/s):",
}


def format_table(report: dict[str, Any]) -> str:
    """Table of a report. Seconds of a whole batch come first."""
    figures = report["figures"]
    lines = [*report["labels"], " Latency Benchmark Result ".center(_WIDTH, "=")]
    lines.append(_line("Avg latency (s):", f"{figures['avg_latency']:.4f}"))
    lines += [_line(f"{q}% percentile latency (s):", f"{value:.4f}") for q, value in figures["percentiles"].items()]
    lines += [*_body(figures), "=" * _WIDTH]
    if "profile" in report:
        lines += ["", *_profile_lines(report["profile"])]
    return "\n".join(lines)


def _profile_lines(profile: dict[str, Any]) -> list[str]:
    """Lines with the parts of a step and their times."""
    return [
        f"Where the time of a step goes ({profile['num_steps']} steps, {profile['step_ms']:.3f} ms each)",
        f"{'part':<28}{'ms a step':>11}{'share %':>11}",
        *(f"{p['name']:<28}{p['ms_per_step']:>11.4f}{100 * p['share']:>11.1f}" for p in profile["parts"]),
        f"concurrently with the steps, in the API process: {profile['detokenize_ms']:.4f} ms a step to detokenize",
        *(f"written: {file}" for file in profile["files"]),
    ]


def _line(name: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<38}{text:>12}"


def _body(figures: dict[str, Any]) -> Iterator[str]:
    for name, text in _COUNTS.items():
        yield _line(text, figures[name])
    for metric in METRICS:
        found = [name for name in figures if name.endswith(f"_{metric}_ms")]
        if found:
            yield METRIC_NAMES[metric].center(_WIDTH, "-")
        for name in found:
            statistic = name.removesuffix(f"_{metric}_ms")
            yield _line(f"{statistic.capitalize()} {metric.upper()} (ms):", figures[name])
    if "acceptance_rate" in figures:
        yield "Speculative Decoding".center(_WIDTH, "-")
        yield _line("Acceptance rate (%):", 100 * figures["acceptance_rate"])
        yield _line("Acceptance length:", figures["acceptance_length"])
        for position, share in enumerate(figures["acceptance_per_position"]):
            yield _line(f"  Position {position} (%):", 100 * share)


def draw_latencies(
    report: dict[str, Any], title: str, records: Mapping[str, Sequence[RequestRecord]], file: Path
) -> None:
    """Draw the cumulative distribution of each latency over the requests of each group, as a PNG."""
    good = {group: [record for record in mine if record.error is None] for group, mine in records.items()}
    shown = [metric for metric in METRICS if any(values(mine, metric) for mine in good.values())]
    machine = report["machine"]
    title_lines = [*report["labels"], title, f"{machine['gpu'] or machine['cpu']}, {machine['date']}"]
    rows = max(1, (len(shown) + 1) // 2)
    figure, axes = panels(title_lines, rows, 2, (10.5, 0.6 + 3.3 * rows))
    for axis, metric in zip(axes.flat, shown, strict=False):
        name = METRIC_NAMES[metric].lower()
        axis.set_title(f"{metric.upper()}: {name}", fontsize=10, loc="left", fontweight="bold")
        axis.set_xlabel("ms")
        axis.set_ylabel("share of the requests" if metric != "itl" else "share of the gaps")
        for group, mine in good.items():
            if found := values(mine, metric):
                axis.ecdf(1e3 * np.asarray(found), label=group, linewidth=1.8)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    if not shown:
        axes[0][0].text(0, 0.5, "no request was answered")
    elif len(records) > 1:
        add_legend(figure, axes[0][0], columns=4)
    save(figure, file)
