"""Tables of results, as `vllm bench` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..bench_options import METRICS

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
