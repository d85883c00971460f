"""Spans of time: recorded while a step runs, summed in a table, exported for Chrome's trace viewer."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

STEP, IPC, WIRE, DETOKENIZE = "step", "IPC", "wire", "detokenize"


class Span(NamedTuple):
    """Span of time, in seconds of the machine's monotonic clock, which all processes share."""

    name: str
    start: float
    end: float


class Recorder:
    """Recorder of the calls of wrapped functions while it is on. For one thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.is_on = False
        self.around: Callable[[str], AbstractContextManager[Any]] | None = None
        """Context manager, made from a name, that is entered around the functions instead of recording them."""

    def wrap(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap `function` so that its calls are recorded as `name`."""

        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            if self.around is not None:
                with self.around(name):
                    return function(*args, **kwargs)
            if not self.is_on:
                return function(*args, **kwargs)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append(Span(name, start, time.perf_counter()))

        return recorded


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


def wire_spans(engine: Sequence[Span], client: Sequence[Span]) -> list[Span]:
    """Spans from the end of a step until the client has its tokens: the i-th step with tokens, and the i-th arrival."""
    sent = [span.end for span in engine if span.name == WIRE]
    came = [span.start for span in client if span.name == DETOKENIZE]
    return [Span(WIRE, end, start) for end, start in zip(sent, came, strict=False) if start >= end]


def summarize(engine: Sequence[Span], client: Sequence[Span]) -> dict[str, Any]:
    """Mean times of the parts of a step, and of the work beside the steps.

    The share of a part is relative to the engine's time: its steps, and the IPC between them.
    """
    marks = [span for span in engine if span.name != WIRE]
    steps = [span for span in marks if span.name == STEP]
    number = max(1, len(steps))
    own = own_seconds(marks)
    own["other"] = own.pop(STEP, 0.0)
    whole = sum(own.values()) or 1.0
    wire = wire_spans(engine, client)
    return {
        "num_steps": len(steps),
        "step_ms": round(1e3 * sum(span.end - span.start for span in steps) / number, 5),
        "parts": [
            {"name": name, "ms_per_step": round(1e3 * seconds / number, 5), "share": round(seconds / whole, 5)}
            for name, seconds in sorted(own.items(), key=lambda item: -item[1])
        ],
        "detokenize_ms": round(1e3 * own_seconds(client).get(DETOKENIZE, 0.0) / number, 5),
        "wire_ms": round(1e3 * sum(span.end - span.start for span in wire) / max(1, len(wire)), 5),
    }


def chrome_trace(tracks: dict[str, Sequence[Span]]) -> dict[str, Any]:
    """Tracks, by name, in the trace event format (JSON), times in microseconds from the first span on.

    Spans of a track that overlap without one being inside the other go to rows of their own: viewers nest what is in
    one row, and lose what cannot be nested.
    """
    origin = min((span.start for spans in tracks.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, (track, spans) in enumerate(tracks.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": track}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        )
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": number,
                "tid": row,
                "ts": round(1e6 * (span.start - origin), 3),
                "dur": round(1e6 * (span.end - span.start), 3),
            }
            for row, span in _in_rows(spans)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _in_rows(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the first row whose other spans have ended when it begins, or contain it."""
    rows: list[list[float]] = []  # the ends of each row's open spans, the innermost last
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for ends in rows:
            while ends and ends[-1] <= span.start:
                ends.pop()
        number = next((i for i, ends in enumerate(rows) if not ends or span.end <= ends[-1]), len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(span.end)
        yield number, span
