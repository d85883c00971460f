"""Profile of a step: batches run as in a server, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .....client.async_llm import AsyncLLM
from .....client.process.supervisor import EngineSpec
from .....core.config import EngineArgs
from .....core.errors import OutriderError
from .....core.lora_request import LoRARequest
from ...bench_options import write_json
from .timeline import DETOKENIZE, WIRE, Recorder, Span, chrome_trace, summarize, wire_spans
from .traced_engine import FOLDER_VARIABLE, OPS_FILE, PROFILER, SPANS_FILE, TIMELINE, TORCH_FILE, TracedEngine

if TYPE_CHECKING:
    from ..latency_session import Batch

TIMELINE_FILE = "timeline.json"
_ENGINE = f"{TracedEngine.__module__}:{TracedEngine.__qualname__}"
_WARM_UP, _RECORDED, _PROFILED = 2, 3, 1
"""Numbers of batches. Torch's profiler makes every operation slower, so the timeline is taken without it."""


def profile(args: EngineArgs, loras: Sequence[LoRARequest], batches: Iterator[Batch], folder: Path) -> dict[str, Any]:
    """Write a timeline and torch's profile to `folder`; returns the timeline's summary.

    Raises:
        OutriderError: the engine cannot start, or the files cannot be written.
    """
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder.resolve())  # the engine's process inherits it
    try:
        client = asyncio.run(_run(args, loras, batches))
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before
    raw = folder / SPANS_FILE
    try:
        engine = [Span(*span) for span in json.loads(raw.read_text(encoding="utf-8"))]
        raw.unlink()
        parts = [span for span in engine if span.name != WIRE]
        wire = wire_spans(engine, client)
        trace = chrome_trace({"engine process": parts, "on the way to the API process": wire, "API process": client})
        write_json(trace, folder / TIMELINE_FILE)
    except OSError as error:
        raise OutriderError(f"the profile cannot be written: {error}", param="profile") from error
    files = [str(folder / name) for name in (TIMELINE_FILE, TORCH_FILE, OPS_FILE)]
    return {**summarize(engine, client), "files": files}


async def _run(args: EngineArgs, loras: Sequence[LoRARequest], batches: Iterator[Batch]) -> list[Span]:
    """Run the batches; returns the client's spans."""
    recorder = Recorder()
    async with AsyncLLM.from_spec(EngineSpec(args=args, engine=_ENGINE)) as llm:
        for lora in loras:
            await llm.adapters.load(lora)
        output = llm.output_processor
        output.process = recorder.wrap(DETOKENIZE, output.process)  # type: ignore[method-assign]
        for salt, number in (("", _WARM_UP), (TIMELINE, _RECORDED), (PROFILER, _PROFILED)):
            recorder.is_on = salt == TIMELINE
            for batch in islice(batches, number):
                await _generate(llm, batch, salt)
            recorder.is_on = False
            await llm.stats()  # ends the engine's recording
    return recorder.spans


async def _generate(llm: AsyncLLM, batch: Batch, salt: str) -> None:
    async def one(prompt: Any, params: Any, lora: LoRARequest | None) -> None:
        async for _ in llm.generate(prompt, params, lora_request=lora, cache_salt=salt, delta=True):
            pass

    await asyncio.gather(*(one(*parts) for parts in zip(batch.prompts, batch.params, batch.loras, strict=True)))
