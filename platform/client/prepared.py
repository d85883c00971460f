"""Requests between their checks and their run, during which they may wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ..core.lora_request import LoRA
from ..core.messages import EngineRequest
from ..core.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from .input_processor import InputProcessor


class RequestOptions(TypedDict, total=False):
    """Options about the owner of a request, and about what it shares with others."""

    priority: int
    """Lower runs first: under the priority policy, and among a tenant's own under the fair one."""
    tenant: str
    weight: float
    """Weight of the tenant under the fair policy: with twice the weight it is served twice as much."""
    cache_salt: str
    """Requests share cached prefixes only with the same salt."""


class Defaults(NamedTuple):
    """Parameters of a request that brings none. Its `max_tokens` is lowered to the tokens that fit."""

    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt, tokenized and checked."""

    token_ids: list[int]
    cache_salt: str = ""
    text: str | None = None
    """None for a prompt of token ids."""
    field: str = "prompt"
    """Name of the request's field that it comes from, for errors."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is checked, and that an engine can run now or later.

    It holds nothing that may change while it waits. The version of its adapter, the prefixes that are shared and the
    state of the engine count as they are when it begins to run.
    """

    request_id: str
    processor: InputProcessor
    """The processor that has checked it: the model's, or its adapter's."""
    prompt: ParsedPrompt
    params: SamplingParams
    """With `max_tokens` and all other limits filled in."""
    lora: LoRA | None
    options: RequestOptions = field(default_factory=RequestOptions)
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    arrival_time: float = 0.0
    """Monotonic time at which it was accepted; latencies are counted from there."""
    ignored_keywords: list[str] = field(default_factory=list)
    """Paths of keywords of its schema that do not hold."""
    loaded: frozenset[str] = frozenset()
    """Names of its adapters that were loaded when it was checked. It runs with what these names mean then."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of its texts; None without one."""
        return self.processor.tokenizer

    def with_max_tokens(self, max_tokens: int) -> Prepared:
        """The request with fewer tokens at most.

        Raises:
            InvalidRequestError: another parameter needs more.
        """
        if max_tokens == self.params.max_tokens:
            return self
        return replace(self, params=self.params.clone(max_tokens=max_tokens))

    def sequences(self, engine_id: str | None = None, lora: LoRA | None = None) -> list[EngineRequest]:
        """Its sequences for the engine, `n` of them, under an id of the engine (by default its own).

        Args:
            lora: the adapter in local folders; None: as it is.
        """
        engine_id = self.request_id if engine_id is None else engine_id
        n, options, token_ids = self.params.n, self.options, self.prompt.token_ids
        cache_salt = options.get("cache_salt") or self.prompt.cache_salt
        num_shared = 0 if cache_salt else self.processor.num_shared_tokens(token_ids)
        return [
            EngineRequest(
                request_id=engine_id if n == 1 else f"{engine_id}#{index}",
                prompt_token_ids=token_ids,
                params=self._sequence_params(index),
                eos_token_ids=self.processor.eos_token_ids,
                lora=self.lora if lora is None else lora,
                priority=options.get("priority", 0),
                tenant=options.get("tenant", ""),
                weight=options.get("weight", 1.0),
                cache_salt=cache_salt,
                num_shared_tokens=num_shared,
                group=None if n == 1 else engine_id,
                arrival_time=self.arrival_time,
            )
            for index in range(n)
        ]

    def _sequence_params(self, index: int) -> SamplingParams:
        params = self.params
        return params if params.n == 1 else params.sibling(_child_seed(params.seed, index), is_first=not index)


def _child_seed(seed: int | None, index: int) -> int | None:
    """Seed of the `index`-th sequence, kept within 64 bits and never -1, which is no seed."""
    if seed is None:
        return None
    if seed < -1 <= seed + index:
        index += 1
    return (seed + index + 2**63) % 2**64 - 2**63
