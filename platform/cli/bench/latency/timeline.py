"""Spans of time: summed in a table, exported for Chrome's trace viewer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEP, IPC, DETOKENIZE = "step", "IPC", "detokenize"


class Span(NamedTuple):
    """Span of time, in seconds of the machine's monotonic clock, which all processes share."""

    name: str
    start: float
    end: float


def own_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Own seconds by name: each span without the spans inside it. Spans of one thread are nested or apart."""
    total: dict[str, float] = defaultdict(float)
    open_spans: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        seconds = span.end - span.start
        total[span.name] += seconds
        if open_spans:
            total[open_spans[-1].name] -= seconds
        open_spans.append(span)
    return dict(total)


def summarize(engine: Sequence[Span], client: Sequence[Span]) -> dict[str, Any]:
    """Mean times of the parts of a step, and of the work concurrent with the steps.

    The share of a part is relative to the engine's time: its steps, and the IPC between them.
    """
    steps = [span.end - span.start for span in engine if span.name == STEP]
    number = max(1, len(steps))
    own = own_seconds(engine)
    own["other"] = own.pop(STEP, 0.0)
    whole = sum(own.values()) or 1.0

    def ms(seconds: float) -> float:
        return round(1e3 * seconds / number, 5)

    return {
        "num_steps": len(steps),
        "step_ms": ms(sum(steps)),
        "parts": [
            {"name": name, "ms_per_step": ms(seconds), "share": round(seconds / whole, 5)}
            for name, seconds in sorted(own.items(), key=lambda item: -item[1])
        ],
        "detokenize_ms": ms(own_seconds(client).get(DETOKENIZE, 0.0)),
    }


def chrome_trace(tracks: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Tracks, by name, in the trace event format (JSON), times in microseconds from the first span on."""
    origin = min((span.start for spans in tracks.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (track, spans) in enumerate(tracks.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track}})
        for span in spans:
            ts, dur = round(1e6 * (span.start - origin), 3), round(1e6 * (span.end - span.start), 3)
            events.append({"ph": "X", "name": span.name, "pid": pid, "tid": 0, "ts": ts, "dur": dur})
    return {"displayTimeUnit": "ms", "traceEvents": events}
