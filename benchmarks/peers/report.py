"""Report of the measurements: medians, ratios within a round, and lines for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .session import Results

OURS = "outrider"
ADAPTIVE = "outrider-adaptive"
"""Name of Outrider with an adaptive number of drafts."""
NOTE = "random weights: rates mean something, texts and how many drafts are accepted do not"


def is_ours(engine: str) -> bool:
    """True for Outrider in any configuration."""
    return engine in (OURS, ADAPTIVE)


def summarize(results: Results) -> dict[str, Any]:
    """All measurements and the figures from them, as JSON."""
    measurements = results.measurements
    by_key = {_key(m): m for m in measurements}
    return {
        "medians": _medians(measurements),
        "ratios": _ratios(measurements),
        "starts": [start | _agreement(start, by_key) for start in results.starts],
        "failures": results.failures,
        "measurements": [{k: v for k, v in m.items() if k != "first_tokens"} for m in measurements],
    }


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("model", "mode", "engine", "requests", "round"))


def _medians(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output tokens/s of each model, mode, engine and number of requests."""
    cells: dict[tuple[Any, ...], list[float]] = {}
    for m in sorted(measurements, key=lambda m: not is_ours(m["engine"])):  # ours first, else as they came
        cells.setdefault(_key(m)[:-1], []).append(m["tokens_per_second"])
    names = ("model", "mode", "engine", "requests")
    return [
        dict(zip(names, cell, strict=True)) | {"tokens_per_second": statistics.median(rates), "rounds": rates}
        for cell, rates in cells.items()
    ]


def _ratios(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outrider's output tokens/s over a peer's in the same round, and the median over the rounds that both have."""
    rates = {_key(m): m["tokens_per_second"] for m in measurements}
    cells: dict[tuple[Any, ...], list[float]] = {}
    for (model, mode, peer, requests, number), rate in rates.items():
        for ours in (OURS, ADAPTIVE):
            mine = rates.get((model, mode, ours, requests, number))
            if mine is not None and not is_ours(peer):
                cells.setdefault((model, mode, ours, peer, requests), []).append(mine / rate)
    names = ("model", "mode", "engine", "peer", "requests")
    return [
        dict(zip(names, cell, strict=True)) | {"ratio": statistics.median(found), "rounds": found}
        for cell, found in cells.items()
    ]


def _agreement(start: dict[str, Any], by_key: dict[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Share of the requests whose first token equals Outrider's: near 1 when both compute the same. (Later tokens of
    random weights in bfloat16 differ at near-ties.)"""
    same = total = 0
    for (model, mode, engine, requests, number), found in by_key.items():
        ours = by_key.get((model, mode, OURS, requests, number))
        if (model, mode, engine) == (start["model"], start["mode"], start["engine"]) and ours is not None:
            pairs = list(zip(found["first_tokens"], ours["first_tokens"], strict=True))
            same, total = same + sum(a == b for a, b in pairs), total + len(pairs)
    return {"same_first_token": same / total if total else None}


def tables(report: dict[str, Any]) -> str:
    """Lines for a terminal: rates, then ratios, then the engines that could not be measured."""
    lines = ["INTERRUPTED: not everything was measured"] if report.get("interrupted") else []
    lines.append("output tokens/s, medians of the rounds")
    for row in report["medians"]:
        cell = f"{row['model']} {row['mode']}, {row['requests']} requests"
        lines.append(f"  {cell:32} {row['engine']:18} {row['tokens_per_second']:10.1f}")
    lines.append("start and memory; share of first tokens that are ours")
    for start in report["starts"]:
        if start["peak_rss_mib"] is None:  # it failed before its first round
            continue
        same = start["same_first_token"]
        lines.append(
            f"  {start['model']} {start['mode']} {start['engine']}: ready in {start['start_seconds']:.1f} s, "
            f"{start['peak_rss_mib'] / 1024:.1f} GiB" + (f", {same:.0%}" if same is not None else "")
        )
    lines.append("how many times as fast, medians of the rounds' ratios")
    for row in report["ratios"]:
        cell = f"{row['model']} {row['mode']}, {row['requests']} requests"
        lines.append(f"  {cell:32} {row['engine']} / {row['peer']}: {row['ratio']:.2f}")
    if report["failures"]:
        lines.append("not measured, or not to the end")
        lines += [f"  {f['engine']} ({f['model']} {f['mode']}): {f['reason']}" for f in report["failures"]]
    return "\n".join(lines)
