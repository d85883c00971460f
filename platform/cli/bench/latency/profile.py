"""Profile of a step: a timeline of an engine in a process of its own, as in a server, and torch's profile."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ....client.async_llm import AsyncLLM
from ....client.llm import LLM
from ....client.process.supervisor import EngineSpec
from ....core.config import EngineArgs
from ....core.errors import OutriderError
from ....core.lora_request import LoRARequest
from ..bench_options import write_json
from .latency_session import Requests
from .timeline import DETOKENIZE, Span, chrome_trace, summarize
from .traced_engine import FOLDER_VARIABLE, SPANS_FILE, AnnotatedEngine, TimedEngine

TIMELINE_FILE, TORCH_FILE, OPS_FILE = "timeline.json", "torch.json", "torch.txt"
_WARM_UP, _RECORDED = 2, 3
"""Numbers of batches."""
_ROWS = 40
"""Operations in torch's table."""


def profile(
    args: EngineArgs, loras: Sequence[LoRARequest], requests: Requests, batches: Iterator[list[Any]], folder: Path
) -> dict[str, Any]:
    """Write a timeline and torch's profile to `folder`; returns the timeline's summary.

    Raises:
        OutriderError: the engine cannot start, or the files cannot be written.
    """
    try:
        summary = _write_timeline(args, loras, requests, batches, folder)
        _write_torch_profile(args, loras, requests, batches, folder)
    except OSError as error:
        raise OutriderError(f"the profile cannot be written: {error}", param="profile") from error
    return summary | {"files": [str(folder / name) for name in (TIMELINE_FILE, TORCH_FILE, OPS_FILE)]}


def _write_timeline(
    args: EngineArgs, loras: Sequence[LoRARequest], requests: Requests, batches: Iterator[list[Any]], folder: Path
) -> dict[str, Any]:
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder.resolve())  # the engine's process inherits it
    try:
        began, client = asyncio.run(_run_batches(args, loras, requests, batches))
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before
    raw = folder / SPANS_FILE
    engine = [Span(*fields) for fields in json.loads(raw.read_text(encoding="utf-8"))]
    raw.unlink()
    engine, client = ([span for span in spans if span.start >= began] for spans in (engine, client))
    write_json(chrome_trace({"engine process": engine, "API process": client}), folder / TIMELINE_FILE)
    return summarize(engine, client)


async def _run_batches(
    args: EngineArgs, loras: Sequence[LoRARequest], requests: Requests, batches: Iterator[list[Any]]
) -> tuple[float, list[Span]]:
    """Run batches to warm up and to record; returns the start time of the recorded ones, and the client's spans."""
    spans: list[Span] = []

    async def generate(prompt: Any, params: Any, lora: LoRARequest | None) -> None:
        async for _ in llm.generate(prompt, params, lora_request=lora, delta=True):
            pass

    async with AsyncLLM.from_spec(EngineSpec(args=args, engine=_import_path(TimedEngine))) as llm:
        for lora in loras:
            await llm.adapters.load(lora)
        process = llm.output_processor.process

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return process(*arguments)
            finally:
                spans.append(Span(DETOKENIZE, start, time.perf_counter()))

        llm.output_processor.process = timed  # type: ignore[method-assign, assignment]
        began = 0.0
        for number in range(_WARM_UP + _RECORDED):
            if number == _WARM_UP:
                began = time.perf_counter()
            one_each = zip(next(batches), requests.params, requests.loras, strict=True)
            await asyncio.gather(*(generate(*parts) for parts in one_each))
    return began, spans


def _write_torch_profile(
    args: EngineArgs, loras: Sequence[LoRARequest], requests: Requests, batches: Iterator[list[Any]], folder: Path
) -> None:
    """Profile one batch in this process. The profiler makes every operation slower, so the timeline is without it."""
    with LLM.from_engine_args(args, engine=_import_path(AnnotatedEngine)) as llm:
        for lora in loras:
            llm.load_lora_adapter(lora)
        llm.generate(next(batches), requests.params, requests.loras, use_tqdm=False)
        with torch.profiler.profile() as profiler:
            llm.generate(next(batches), requests.params, requests.loras, use_tqdm=False)
    profiler.export_chrome_trace(str(folder / TORCH_FILE))
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS)
    (folder / OPS_FILE).write_text(table, encoding="utf-8")


def _import_path(engine: type) -> str:
    return f"{engine.__module__}:{engine.__qualname__}"
