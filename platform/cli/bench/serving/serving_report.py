"""Tables of results, as `vllm bench` prints them, and pictures of the distribution of each latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench_options import METRICS
from ..pictures import BLUE, RED, panels, save
from ..request_figures import RequestRecord, values

_WIDTH = 50
METRIC_NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_COUNTS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total token throughput (tok/s):",
}
_CLIENT = {
    "cpu_share": "Share of a core used by the client:",
    "peak_concurrency": "Peak concurrent requests:",
    "p99_send_delay_ms": "P99 delay of sending (ms):",
}


def format_table(report: dict[str, Any]) -> str:
    """Table of the report of `latency` (seconds of a whole batch come first), `throughput` or `serve`."""
    kind = {"latency": "Latency", "throughput": "Throughput", "serve": "Serving"}[report["benchmark"]]
    figures = report["figures"]
    lines = [*report["labels"], f" {kind} Benchmark Result ".center(_WIDTH, "=")]
    if "avg_latency" in figures:
        lines.append(_line("Avg latency (s):", f"{figures['avg_latency']:.4f}"))
        lines += [_line(f"{q}% percentile latency (s):", f"{value:.4f}") for q, value in figures["percentiles"].items()]
    lines += _body(figures)
    if "client" in report:
        lines.append("Client".center(_WIDTH, "-"))
        lines += [_line(text, report["client"][name]) for name, text in _CLIENT.items() if name in report["client"]]
    lines.append("=" * _WIDTH)
    lines += [f"failed: {error}" for error in report.get("errors", ())]
    if "profile" in report:
        lines += ["", *_profile_lines(report["profile"])]
    return "\n".join(lines)


def _profile_lines(profile: dict[str, Any]) -> list[str]:
    """Lines with the parts of a step and their times."""
    return [
        f"Where the time of a step goes ({profile['num_steps']} steps, {profile['step_ms']:.3f} ms each)",
        f"{'part':<28}{'ms a step':>11}{'share %':>11}",
        *(f"{p['name']:<28}{p['ms_per_step']:>11.4f}{100 * p['share']:>11.1f}" for p in profile["parts"]),
        f"beside the steps, in the API's process: {profile['detokenize_ms']:.4f} ms a step to detokenize",
        *(f"written: {file}" for file in profile["files"]),
    ]


def _line(name: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<38}{text:>12}"


def _body(figures: dict[str, Any]) -> Iterator[str]:
    for name, text in _COUNTS.items():
        if name in figures:
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


def draw_latencies(report: dict[str, Any], records: Sequence[RequestRecord], file: Path) -> None:
    """Draw the cumulative distribution of each latency over the requests, as a PNG."""
    good = [record for record in records if record.error is None]
    found = {metric: 1e3 * np.sort(np.asarray(values(good, metric))) for metric in METRICS}
    shown = {metric: ms for metric, ms in found.items() if len(ms)}
    machine, figures = report["machine"], report["figures"]
    title = [
        *report["labels"],
        f"{report['benchmark']}: {report['model']['name']}; {figures['completed']} requests, "
        f"{figures['output_throughput']:.1f} output tokens/s, {figures['request_throughput']:.2f} requests/s",
        f"{machine['gpu'] or machine['cpu']}, {machine['date']}",
    ]
    rows = max(1, (len(shown) + 1) // 2)
    figure, axes = panels(title, rows, 2, (10.5, 0.6 + 3.3 * rows))
    for axis, (metric, ms) in zip(axes.flat, shown.items(), strict=False):
        _draw_shares(axis, metric, ms)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    if not shown:
        axes[0][0].text(0, 0.5, "no request was answered")
    save(figure, file)


def _draw_shares(axis: Any, metric: str, ms: Any) -> None:
    axis.set_title(f"{metric.upper()}: {METRIC_NAMES[metric].lower()}", fontsize=10, loc="left", fontweight="bold")
    axis.set_xlabel("ms")
    axis.set_ylabel("share of the requests" if metric != "itl" else "share of the gaps")
    axis.ecdf(ms, color=BLUE, linewidth=1.8)
    axis.set_xlim(0, 1.05 * float(ms[-1]) or 1.0)
    for q in (50, 99):
        value = float(np.percentile(ms, q))
        axis.plot([value], [q / 100], "o", color=RED, markersize=4)
        left = value > 0.7 * float(ms[-1])
        place = {"textcoords": "offset points", "xytext": (-6 if left else 6, -12), "ha": "right" if left else "left"}
        axis.annotate(f"p{q} {value:.4g} ms", (value, q / 100), fontsize=8, **place)
