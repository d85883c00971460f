"""Engine that records the times of its steps' parts, for `outrider bench latency --profile`.

It runs in the engine's process, which makes it from an import path. The cache salt of a request selects the kind of
recording; `stats` ends a recording and writes it into the folder named by the environment.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from .....core.config import EngineArgs
from .....core.messages import EngineRequest, EngineStats, TokenDelta
from .....engine.engine_core import EngineCore
from .step_parts import wrap_parts
from .timeline import IPC, STEP, WIRE, Recorder, Span

FOLDER_VARIABLE = "OUTRIDER_PROFILE_DIR"
TIMELINE, PROFILER = "profile: timeline", "profile: torch"
"""Cache salts of requests whose steps are recorded, as spans or by torch's profiler."""
SPANS_FILE, TORCH_FILE, OPS_FILE = "engine-spans.json", "torch.json", "torch.txt"
_ROWS = 40


class TracedEngine:
    """`EngineCore` with wrapped parts; all other attributes are those of the core."""

    def __init__(self, args: EngineArgs, *, progress: bool = False) -> None:
        self._recorder = Recorder()
        self._core = EngineCore(args, progress=progress)
        wrap_parts(self._core, self._recorder.wrap)
        self._step = self._recorder.wrap(STEP, self._core.step)
        self._profiler: Any = None
        self._left: float | None = None
        """End of the last step, if another one follows."""
        self._folder = Path(os.environ[FOLDER_VARIABLE])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def add_request(self, request: EngineRequest) -> None:
        """Add a request. The first one with the salt of a recording begins it."""
        if request.cache_salt == TIMELINE:
            self._recorder.is_on = True
        elif request.cache_salt == PROFILER and self._profiler is None:
            self._profiler = torch.profiler.profile(activities=_activities())
            self._profiler.start()
            self._recorder.around = torch.profiler.record_function
        self._core.add_request(request)

    def step(self) -> list[TokenDelta]:
        """Run a step. The time from the end of one to the beginning of the next is spent on messages (IPC)."""
        if self._recorder.is_on and self._left is not None:
            self._recorder.spans.append(Span(IPC, self._left, time.perf_counter()))
        deltas = self._step()
        now = time.perf_counter()
        if self._recorder.is_on and deltas:
            self._recorder.spans.append(Span(WIRE, now, now))  # a mark: the tokens leave now
        self._left = now if self._core.has_work() else None
        return deltas

    def stats(self) -> EngineStats:
        """End the recording and write it."""
        if self._recorder.is_on:
            self._recorder.is_on = False
            (self._folder / SPANS_FILE).write_text(json.dumps(self._recorder.spans), encoding="utf-8")
        if self._profiler is not None:
            self._recorder.around = None
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / TORCH_FILE))
            table = self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS)
            (self._folder / OPS_FILE).write_text(table, encoding="utf-8")
            self._profiler = None
        return self._core.stats()


def _activities() -> list[Any]:
    found = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(torch.profiler.ProfilerActivity.CUDA)
    return found
