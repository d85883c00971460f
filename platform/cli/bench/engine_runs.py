"""Requests through an engine in this process, and the times at which their tokens come."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence

from ...core.errors import OutriderError
from ...core.lora_request import LoRARequest
from ...core.messages import EngineRequest
from ...engine.engine_core import EngineCore
from .request_figures import RequestRecord, Round

BLOCK_SIZE = 16
"""Tokens of a KV block of the measured engines."""


class Run:
    """Requests that go through an engine, and their times."""

    def __init__(self, core: EngineCore, name: str) -> None:
        """`name` is the prefix of error messages."""
        self.records: dict[str, RequestRecord] = {}
        """By request id, in the order of arrival."""
        self.live: set[str] = set()
        """Ids of the requests that have not ended."""
        self._core = core
        self._name = name

    def add(self, request: EngineRequest, arrived: float | None = None) -> None:
        """Add a request that arrives now, or that arrived a moment ago, while a step ran."""
        started = time.perf_counter() if arrived is None else arrived
        self.records[request.request_id] = RequestRecord(
            len(self.records),
            started,
            num_prompt_tokens=len(request.prompt_token_ids),
            adapter=request.lora.name if isinstance(request.lora, LoRARequest) else None,
        )
        self._core.add_request(request)
        self.live.add(request.request_id)

    def step(self) -> None:
        """Run one step of the engine.

        Raises:
            OutriderError: a request failed.
        """
        deltas = self._core.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.error is not None:
                raise OutriderError(f"{self._name}: a request failed: {delta.error.message}")
            record = self.records[delta.request_id]
            if delta.token_ids:
                record.token_ids += delta.token_ids
                record.num_output_tokens += len(delta.token_ids)
                record.arrivals.append(now)
            record.speculation = delta.speculation or record.speculation
            if delta.finish_reason is not None:
                self.live.remove(delta.request_id)

    def abort(self) -> None:
        """Abort the requests that have not ended."""
        self._core.abort(self.live)
        self.live.clear()

    def complete(self, requests: Sequence[EngineRequest], concurrency: int) -> Round:
        """Generate, with at most `concurrency` requests at once: the next starts when one ends.

        Raises:
            OutriderError: a request failed.
        """
        waiting = deque(requests)
        started, cpu_started = time.perf_counter(), time.thread_time()
        while waiting or self.live:
            while waiting and len(self.live) < concurrency:
                self.add(waiting.popleft())
            self.step()
        cpu_seconds = time.thread_time() - cpu_started if self._core.info.device == "cpu" else 0.0
        return Round(time.perf_counter() - started, list(self.records.values()), cpu_seconds)


def num_blocks(length: int) -> int:
    """KV blocks of a sequence of `length` tokens, with one to spare."""
    return -(-(length + 1) // BLOCK_SIZE) + 1


def freeze_heap() -> None:
    """Exempt all present objects from garbage collection: a collection of them would delay a step by a tenth of a
    second. A server does the same after its start."""
    gc.collect()
    gc.freeze()
