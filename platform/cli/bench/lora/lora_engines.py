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
from ..popularity import choose
from ..prompts import random_ids
from ..request_figures import Round
from .cases import Case

_WARM_UP_TOKENS = 8
_LOW_IDS = range(10)
"""Token ids that no prompt has, as low ones are often special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Shape of every request."""

    input_len: int
    output_len: int
    num_in_use: int | None
    """Number of adapters that requests ask for; None for all."""
    seed: int
    vocab_size: int

    def request(
        self, name: str, num_tokens: int, lora: LoRARequest | None, input_len: int | None = None
    ) -> EngineRequest:
        """A greedy request of full length, as the text of random weights has no end. Equal names have equal prompts."""
        prompt = random_ids(random.Random(f"{self.seed} {name}"), self.input_len, self.vocab_size, _LOW_IDS)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return EngineRequest(name, prompt[:input_len], params, lora=lora)

    def used(self, num_adapters: int) -> int:
        """Number of adapters that requests ask for, of `num_adapters`."""
        return num_adapters if self.num_in_use is None else min(num_adapters, self.num_in_use)


class Engines:
    """Both engines, with equal options except for adapters, and the adapters that are registered in one of them."""

    def __init__(self, shared: dict[str, Any], lora: dict[str, Any], workload: Workload) -> None:
        """Load them; see `EngineCore` for the errors. `shutdown` them in the end."""
        self.workload = workload
        self.adapters: list[LoRARequest] = []
        """The registered ones."""
        self.plain = EngineCore(EngineArgs(**shared))
        self.serving = EngineCore(EngineArgs(**shared, enable_lora=True, **lora))
        freeze_heap()

    def shutdown(self) -> None:
        """Shut both engines down."""
        self.plain.shutdown()
        self.serving.shutdown()

    def register(self, adapter: LoRARequest) -> None:
        """Register an adapter, which is read at its first request; errors as in `EngineCore`."""
        self.serving.adapters.register([adapter])
        self.adapters.append(adapter)

    def run(self, case: Case, round_number: int, *, warm_up: bool = False) -> Round:
        """Run the requests of one round of a case. Requests of a warm-up are short.

        Raises:
            OutriderError: a request failed.
        """
        workload = self.workload
        wanted: list[LoRARequest | None] = [None] * case.batch_size
        if case.num_adapters:
            number = workload.used(case.num_adapters)
            indices = choose(case.popularity, case.batch_size, number, round_number, workload.seed)
            wanted = [self.adapters[index] for index in indices]
        num_tokens = min(_WARM_UP_TOKENS, workload.output_len) if warm_up else workload.output_len
        requests = [
            workload.request(f"{case.batch_size} {round_number} {index}", num_tokens, lora)
            for index, lora in enumerate(wanted)
        ]
        core = self.plain if case.num_adapters is None else self.serving
        return Run(core, "bench lora").complete(requests, case.batch_size)

    def load(self, adapters: Sequence[LoRARequest], concurrency: int) -> None:
        """Send one short request for each adapter, so that memory holds as many as fit."""
        requests = [self.workload.request(f"load {lora.name}", 1, lora, input_len=8) for lora in adapters]
        Run(self.serving, "bench lora").complete(requests, concurrency)

    def unregister(self, adapters: Sequence[LoRARequest]) -> None:
        """Unregister adapters without requests, so that the next request for one must read it from disk."""
        known = {info.name for info in self.serving.adapters.list()}
        for lora in adapters:
            if lora.name in known:
                self.serving.adapters.unload(lora.name)

    def take_load_seconds(self) -> list[float]:
        """Durations of the loads that ended since the last call."""
        return self.serving.stats().lora_load_seconds

    def adapters_by_level(self) -> dict[str, int]:
        """Number of adapters by the level of memory that holds them."""
        return dict(Counter(info.level for info in self.serving.adapters.list()))
