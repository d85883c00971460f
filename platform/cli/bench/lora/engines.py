"""The two compared engines, one with adapters and one without, and the requests of both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....core.config import EngineArgs
from ....core.lora_request import LoRARequest
from ....core.messages import EngineRequest
from ....core.sampling_params import SamplingParams
from ....engine.engine_core import EngineCore
from ..engine_runs import Run, freeze_heap
from .budget import Budget
from .cases import Case, choose
from .figures import Run as Figures
from .figures import summarize

_WARM_UP_TOKENS = 8
_LOWEST_TOKEN = 10
"""Smallest token id of random prompts: lower ones are often special."""
_HIGHEST_TOKEN = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Shape of every request."""

    input_len: int
    output_len: int
    waves: int
    """Requests of a run, over the batch size."""
    num_in_use: int | None
    """Number of adapters that requests ask for; None for all."""
    seed: int
    vocab_size: int

    def prompt(self, *key: object) -> list[int]:
        """Random token ids; equal keys give equal ids."""
        generator = random.Random(f"{self.seed} {key}")
        high = min(_HIGHEST_TOKEN, self.vocab_size)
        return [generator.randrange(min(_LOWEST_TOKEN, high - 1), high) for _ in range(self.input_len)]

    def request(self, request_id: str, prompt: list[int], num_tokens: int, lora: LoRARequest | None) -> EngineRequest:
        """A greedy request of full length: the text of random weights has no end."""
        return EngineRequest(
            request_id, prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), lora=lora
        )

    def used(self, num_adapters: int) -> int:
        """Number of adapters that requests ask for, of `num_adapters`."""
        return num_adapters if self.num_in_use is None else min(num_adapters, self.num_in_use)


class Engines:
    """Both engines, with equal options except for adapters, and the adapters that are registered in one of them."""

    def __init__(self, shared: dict[str, Any], lora: dict[str, Any], workload: Workload) -> None:
        """Load them; see `EngineCore` for the errors. `shutdown` them in the end."""
        self.workload = workload
        self.adapters: dict[tuple[int, ...], list[LoRARequest]] = {}
        """Registered adapters, by the ranks that they have in turn."""
        self.plain = EngineCore(EngineArgs(**shared))
        self.serving = EngineCore(EngineArgs(**shared, enable_lora=True, **lora))
        freeze_heap()

    def shutdown(self) -> None:
        """Shut both engines down."""
        self.plain.shutdown()
        self.serving.shutdown()

    def register(self, ranks: tuple[int, ...], adapter: LoRARequest) -> None:
        """Register an adapter of these ranks, which is read at its first request; errors as in `EngineCore`."""
        self.serving.adapters.register([adapter])
        self.adapters.setdefault(ranks, []).append(adapter)

    def run(self, case: Case, round_number: int, *, warm_up: bool = False) -> Figures:
        """Run the requests of one round of a case. Requests of a warm-up are short.

        Raises:
            OutriderError: a request failed.
        """
        workload = self.workload
        count = case.batch_size * workload.waves
        wanted: list[LoRARequest | None] = [None] * count
        if case.num_adapters:
            number = workload.used(case.num_adapters)
            indices = choose(case.popularity, count, number, round_number, workload.seed)
            wanted = [self.adapters[case.ranks][index] for index in indices]
        num_tokens = min(_WARM_UP_TOKENS, workload.output_len) if warm_up else workload.output_len
        prompts = [workload.prompt(case.batch_size, round_number, index) for index in range(count)]
        requests = [
            workload.request(str(index), prompt, num_tokens, lora)
            for index, (prompt, lora) in enumerate(zip(prompts, wanted, strict=True))
        ]
        core = self.plain if case.num_adapters is None else self.serving
        run = Run(core, "bench lora")
        seconds = run.complete(requests, case.batch_size)
        distinct = len({lora.name for lora in wanted if lora is not None})
        return summarize(seconds, run.times.values(), sum(map(len, prompts)), distinct)

    def load(self, adapters: Sequence[LoRARequest], concurrency: int, budget: Budget) -> None:
        """Send one short request for each adapter, so that memory holds as many as fit."""
        run = Run(self.serving, "bench lora")
        for start in range(0, len(adapters), concurrency):
            budget.check()
            some = adapters[start : start + concurrency]
            requests = [
                self.workload.request(f"load {start + index}", self.workload.prompt(index)[:8], 1, lora)
                for index, lora in enumerate(some)
            ]
            run.complete(requests, concurrency)

    def unregister(self, adapters: Sequence[LoRARequest]) -> None:
        """Unregister adapters without requests, so that the next request for one must read it from disk."""
        known = {info.name for info in self.serving.adapters.list()}
        for lora in adapters:
            if lora.name in known:
                self.serving.adapters.unload(lora.name)

    def take_load_seconds(self) -> list[float]:
        """Durations of the loads that ended since the last call."""
        return self.serving.stats().lora_load_seconds

    def facts(self) -> dict[str, Any]:
        """Memory levels of the adapters, and their sizes."""
        stats = self.serving.stats()
        levels = Counter(info.level for info in self.serving.adapters.list())
        return {
            "adapters_by_level": dict(levels),
            "lora_host_bytes": stats.lora_host_bytes,
            "lora_rows_used": stats.lora_rows_used,
            "lora_rows": stats.lora_rows,
        }
