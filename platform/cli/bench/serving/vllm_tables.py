"""Tables of results, as `vllm bench` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .....models.checkpoint.json_files import read_json
from ....core.errors import OutriderError
from ..machine import RANDOM_WEIGHTS
from ..speculation.speculation_table import labels

_WIDTH = 50
_TITLES = {
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
_ACCEPTANCE = {"acceptance_rate": "Acceptance rate (%):", "acceptance_length": "Acceptance length:"}


def has_random_weights(folder: Path) -> bool:
    """True when a model's config.json says that it was never trained."""
    try:
        return bool(read_json(folder / "config.json").get(RANDOM_WEIGHTS))
    except OutriderError:
        return False


def weight_labels(random_weights: bool, synthetic: Sequence[float] | None = None) -> list[str]:
    """Warnings that text or acceptance are not real."""
    return labels(synthetic=synthetic, random_weights=random_weights)


def serving_table(report: dict[str, Any]) -> str:
    """Table of the report of `serve`."""
    lines = [*_head(report, "Serving Benchmark Result"), *_body(report["figures"])]
    client = report["client"]
    lines.append(_title("Client"))
    lines.append(_line("Share of a core used by the client:", client["cpu_share"]))
    lines.append(_line("Peak concurrent requests:", client["peak_concurrency"]))
    if "p99_send_delay_ms" in client:
        lines.append(_line("P99 delay of sending (ms):", client["p99_send_delay_ms"]))
    lines.append("=" * _WIDTH)
    lines += [f"failed: {error}" for error in report["errors"]]
    return "\n".join(lines)


def throughput_table(report: dict[str, Any]) -> str:
    """Table of the report of `throughput`."""
    return "\n".join([*_head(report, "Throughput Benchmark Result"), *_body(report["figures"]), "=" * _WIDTH])


def latency_table(report: dict[str, Any]) -> str:
    """Table of the report of `latency`: seconds of a whole batch, then latencies of single requests."""
    figures = report["figures"]
    lines = _head(report, "Latency Benchmark Result")
    lines.append(_line("Avg latency (s):", f"{figures['avg_latency']:.4f}"))
    lines += [_line(f"{q}% percentile latency (s):", f"{value:.4f}") for q, value in figures["percentiles"].items()]
    lines += [*_body(figures), "=" * _WIDTH]
    if "profile" in report:
        lines += ["", profile_table(report["profile"])]
    return "\n".join(lines)


def profile_table(profile: dict[str, Any]) -> str:
    """Lines with the parts of a step and their times."""
    lines = [f"Where the time of a step goes ({profile['num_steps']} steps, {profile['step_ms']:.3f} ms each)"]
    lines.append(f"{'part':<28}{'ms a step':>11}{'share %':>11}")
    lines += [
        f"{part['name']:<28}{part['ms_per_step']:>11.4f}{100 * part['share']:>11.1f}" for part in profile["parts"]
    ]
    lines.append(f"beside the steps, in the API's process: {profile['detokenize_ms']:.4f} ms a step to detokenize,")
    lines.append(f"{profile['wire_ms']:.4f} ms from the end of a step until its tokens are there")
    return "\n".join([*lines, *(f"written: {file}" for file in profile["files"])])


def _head(report: dict[str, Any], title: str) -> list[str]:
    return [*report["labels"], f" {title} ".center(_WIDTH, "=")]


def _title(text: str) -> str:
    return text.center(_WIDTH, "-")


def _line(name: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<38}{text:>12}"


def _body(figures: dict[str, Any]) -> Iterator[str]:
    for name, text in _COUNTS.items():
        if name in figures:
            yield _line(text, figures[name])
    for metric, title in _TITLES.items():
        found = [name for name in figures if name.endswith(f"_{metric}_ms")]
        if found:
            yield _title(title)
        for name in found:
            statistic = name.removesuffix(f"_{metric}_ms")
            yield _line(f"{statistic.capitalize()} {metric.upper()} (ms):", figures[name])
    if "acceptance_rate" in figures:
        yield _title("Speculative Decoding")
        yield _line(_ACCEPTANCE["acceptance_rate"], 100 * figures["acceptance_rate"])
        yield _line(_ACCEPTANCE["acceptance_length"], figures["acceptance_length"])
        for position, share in enumerate(figures["acceptance_per_position"]):
            yield _line(f"  Position {position} (%):", 100 * share)
