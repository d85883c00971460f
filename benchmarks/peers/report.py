"""Report of the measurements: medians, ratios within a round, and tables for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .session import Results

OURS = "outrider"
ADAPTIVE = "outrider-adaptive"
"""Name of Outrider with an adaptive number of drafts."""
NOTE = "random weights: rates mean something, texts and how many drafts are accepted do not"
_GIB = 1024


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


def present(rows: Iterable[dict[str, Any]], field: str) -> list[Any]:
    """Different values of a field, in the order of their first row."""
    return list(dict.fromkeys(row[field] for row in rows))


def tables(report: dict[str, Any]) -> str:
    """Text of the result: tables of rates and ratios for each model, and the engines that could not be measured."""
    parts = []
    if report.get("interrupted"):
        parts.append("INTERRUPTED: not everything was measured")
    medians = report["medians"]
    for model in present(medians, "model"):
        rows = [row for row in medians if row["model"] == model]
        requests = sorted(present(rows, "requests"))
        titles = [f"{n} request{'s' if n > 1 else ''}" for n in requests]
        rounds = max(len(row["rounds"]) for row in rows)
        lines = _rate_lines(report, rows, requests)
        parts.append(f"{model}: output tokens/s, medians of {rounds} rounds")
        parts.append(_aligned([["mode", "engine", *titles, "ready in", "peak memory", "first token as ours"], *lines]))
        lines = _ratio_lines([row for row in report["ratios"] if row["model"] == model], requests)
        if lines:
            parts.append(f"{model}: how many times as fast, medians of the rounds' ratios")
            parts.append(_aligned([["mode", "", *titles], *lines]))
    if report["failures"]:
        parts.append("Not measured, or not to the end:")
        parts += [f"  {f['engine']} ({f['model']} {f['mode']}): {f['reason']}" for f in report["failures"]]
    return "\n".join(parts)


def _rate_lines(report: dict[str, Any], rows: list[dict[str, Any]], requests: list[int]) -> list[list[str]]:
    lines = []
    for mode in present(rows, "mode"):
        for engine in present([row for row in rows if row["mode"] == mode], "engine"):
            cells = {r["requests"]: r["tokens_per_second"] for r in rows if (r["mode"], r["engine"]) == (mode, engine)}
            rates = [f"{cells[n]:.1f}" if n in cells else "-" for n in requests]
            keys = (rows[0]["model"], mode, engine)
            start = next(s for s in report["starts"] if (s["model"], s["mode"], s["engine"]) == keys)
            same = start["same_first_token"]
            lines.append(
                [
                    mode,
                    engine,
                    *rates,
                    f"{start['start_seconds']:.1f} s",
                    f"{start['peak_rss_mib'] / _GIB:.1f} GiB",
                    "" if same is None or engine == OURS else f"{same:.0%}",
                ]
            )
    return lines


def _ratio_lines(rows: list[dict[str, Any]], requests: list[int]) -> list[list[str]]:
    cells: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        cells.setdefault((row["mode"], row["engine"], row["peer"]), {})[row["requests"]] = row["ratio"]
    return [
        [mode, f"{ours} / {peer}", *(f"{found[n]:.2f}" if n in found else "-" for n in requests)]
        for (mode, ours, peer), found in cells.items()
    ]


def _aligned(lines: list[list[str]]) -> str:
    """Lines of a table: the first two columns aligned to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
