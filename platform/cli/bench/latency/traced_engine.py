"""Engines whose parts of a step are named, for `outrider bench latency --profile`.

A client makes them from an import path. `TimedEngine` records spans and writes them at its shutdown into the folder
that the environment names; `AnnotatedEngine` names the parts for torch's profiler.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .....models.pass_chain import PassChain
from .....models.pass_graphs import GraphedPass
from ....core.config import EngineArgs
from ....core.messages import TokenDelta
from ....engine.engine_core import EngineCore
from ....engine.runner.model_runner import ModelRunner
from ....engine.sampling.sampler import Sampler
from .timeline import IPC, STEP, Span

FOLDER_VARIABLE = "OUTRIDER_PROFILE_DIR"
SPANS_FILE = "engine-spans.json"
_ADAPTER_SITES = ("lora", "gains", "lookup_lora", "lookup_gains", "head_lora", "head_gains")
"""Attributes of layers that hold the weights of adapters."""

Wrap: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name, function) to a function that does the same under the name."""


def wrap_parts(core: EngineCore, wrap: Wrap) -> contextlib.ExitStack:
    """Wrap the functions of a step: of this engine's objects, and of the classes that only an engine uses. Closing the
    result takes that back.

    Names: schedule, prepare, forward, replay, attention, LoRA, logits, sample, collect, commit, draft. They nest:
    attention and LoRA lie inside forward, and forward inside prepare, whose own time is that of building the batch.
    `replay` is a captured pass of the target or the drafter, or a draft loop; `collect` waits for the outcome.
    """

    undo = contextlib.ExitStack()

    def around(name: str, owner: Any, function: str) -> None:
        original = getattr(owner, function)
        setattr(owner, function, wrap(name, original))
        undo.callback(setattr, owner, function, original)

    model = core.model
    around("schedule", core.scheduler, "schedule")
    around("commit", core.scheduler, "commit")
    around("prepare", ModelRunner, "launch")
    around("collect", ModelRunner, "collect")
    around("draft", ModelRunner, "draft")
    around("sample", Sampler, "begin")
    around("replay", GraphedPass, "run")
    around("replay", PassChain, "loop")
    around("forward", model, "forward")
    around("logits", model, "compute_logits")
    around("attention", model.attention, "forward_qkv")
    for layer in (*model.linears(), model.embedding):
        for site in filter(None, (getattr(layer, place, None) for place in _ADAPTER_SITES)):
            for function in ("add", "scale"):
                if hasattr(site, function):
                    around("LoRA", site, function)
    return undo


class AnnotatedEngine:
    """`EngineCore` whose parts have names in torch's profiles; all other attributes are those of the core."""

    def __init__(self, args: EngineArgs, *, progress: bool = False) -> None:
        self._core = EngineCore(args, progress=progress)
        self._wrapped = wrap_parts(self._core, self._wrap)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.profiler.record_function(name)(function)

    def shutdown(self) -> None:
        """Shut the core down."""
        self._wrapped.close()
        self._core.shutdown()


class TimedEngine(AnnotatedEngine):
    """`EngineCore` that records the spans of its steps and their parts."""

    def __init__(self, args: EngineArgs, *, progress: bool = False) -> None:
        self._spans: list[Span] = []
        self._left: float | None = None
        """End of the last step, if another one follows."""
        super().__init__(args, progress=progress)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append(Span(name, start, time.perf_counter()))

        return timed

    def step(self) -> list[TokenDelta]:
        """Run a step. The time from the end of one to the start of the next is spent on messages (IPC)."""
        start = time.perf_counter()
        deltas = self._core.step()
        end = time.perf_counter()
        if self._left is not None:
            self._spans.append(Span(IPC, self._left, start))
        self._spans.append(Span(STEP, start, end))
        self._left = end if self._core.has_work() else None
        return deltas

    def shutdown(self) -> None:
        """Write what was recorded, and shut the core down."""
        (Path(os.environ[FOLDER_VARIABLE]) / SPANS_FILE).write_text(json.dumps(self._spans), encoding="utf-8")
        super().shutdown()
