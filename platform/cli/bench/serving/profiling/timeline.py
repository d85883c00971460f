"""Spans of time: summed in a table, exported for Chrome's trace viewer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEP, IPC, WIRE, DETOKENIZE = "step", "IPC", "wire", "detokenize"


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


def wire_spans(sent: Sequence[float], client: Sequence[Span]) -> list[Span]:
    """Spans from the end of a step until the client has its tokens: the i-th time of sending, and the i-th arrival."""
    came = [span.start for span in client if span.name == DETOKENIZE]
    return [Span(WIRE, end, start) for end, start in zip(sent, came, strict=False) if start >= end]


def summarize(engine: Sequence[Span], wire: Sequence[Span], client: Sequence[Span]) -> dict[str, Any]:
    """Mean times of the parts of a step, and of the work beside the steps.

    The share of a part is relative to the engine's time: its steps, and the IPC between them.
    """
    steps = [span.end - span.start for span in engine if span.name == STEP]
    number = max(1, len(steps))
    own = own_seconds(engine)
    own["other"] = own.pop(STEP, 0.0)
    whole = sum(own.values()) or 1.0

    def ms(seconds: float, count: int = number) -> float:
        return round(1e3 * seconds / max(1, count), 5)

    return {
        "num_steps": len(steps),
        "step_ms": ms(sum(steps)),
        "parts": [
            {"name": name, "ms_per_step": ms(seconds), "share": round(seconds / whole, 5)}
            for name, seconds in sorted(own.items(), key=lambda item: -item[1])
        ],
        "detokenize_ms": ms(own_seconds(client).get(DETOKENIZE, 0.0)),
        "wire_ms": ms(sum(span.end - span.start for span in wire), len(wire)),
    }


def chrome_trace(tracks: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Tracks, by name, in the trace event format (JSON), times in microseconds from the first span on.

    Spans of the track WIRE overlap without one being inside the other, so they are asynchronous events.
    """
    origin = min((span.start for spans in tracks.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (track, spans) in enumerate(tracks.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track}})
        for number, span in enumerate(spans):
            event = {"name": span.name, "cat": track, "pid": pid, "tid": 0, "ts": round(1e6 * (span.start - origin), 3)}
            if span.name == WIRE:
                end = round(1e6 * (span.end - origin), 3)
                events += [event | {"ph": "b", "id": number}, event | {"ph": "e", "id": number, "ts": end}]
            else:
                events.append(event | {"ph": "X", "dur": round(1e6 * (span.end - span.start), 3)})
    return {"displayTimeUnit": "ms", "traceEvents": events}
