"""Generation job of one HTTP request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...client.prepared import ParsedPrompt, Prepared, RequestOptions
from ...core.beam_search import BeamSearchParams
from ...core.errors import InvalidRequestError, invalid
from ...core.lora_request import LoRA
from ...core.messages import EngineInfo
from ...core.outputs import RequestOutput
from ...core.sampling_params import SamplingParams
from ...tenancy.accounts.principal import OPEN, Principal
from ...tenancy.limits.demand import Demand
from ..body.bounds import MAX_LOGPROBS
from ..observe.generations import Counts, Generation


class Arrival(NamedTuple):
    """Arrival of a request: wall-clock and monotonic time of the same moment."""

    wall: float
    monotonic: float

    def at(self, monotonic: float) -> float:
        """Wall-clock time of a later moment, unaffected by changes of the clock: no request ends before it began."""
        return self.wall + (monotonic - self.monotonic)


def now() -> Arrival:
    """The present moment as an `Arrival`."""
    return Arrival(time.time(), time.monotonic())


@dataclass(slots=True)
class Job:
    """The prompts and parameters of one request, and on whose behalf they run."""

    request_id: str
    prompts: list[ParsedPrompt]
    params: SamplingParams
    lora: LoRA | None
    priority: int = 0
    cache_salt: str = ""
    default_max_tokens: int | None = None
    """Default of `max_tokens`, or fewer if the context ends first. None: as many as fit."""
    max_tokens_field: str = "max_tokens"
    """Name of the field in the request."""
    keeps_output: bool = True
    """False if only the prompt's log-probabilities are wanted: the one generated token is dropped."""
    beam: BeamSearchParams | None = None
    """Parameters of a beam search; its `max_tokens` are those of `prepared`. None: tokens are sampled."""
    searching: dict[int, int] = field(default_factory=dict)
    """Output tokens of the beam searches that run, by prompt."""
    principal: Principal = OPEN
    endpoint: str = ""
    model: str = ""
    """Model as requested."""
    arrival: Arrival = field(default_factory=now)
    on_admitted: Callable[[], None] = lambda: None
    """Called when the job has its slots and waits no longer."""
    prepared: list[Prepared] = field(default_factory=list)
    """A request for each prompt, once they have been checked."""
    generations: list[Generation] = field(default_factory=list)
    """A generation for each prompt, once the job runs."""
    counts: Counts = field(default_factory=Counts)
    """Counts of all generations."""

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each prompt."""
        return tuple(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for it."""
        return self.params.n * len(self.prompts)

    @property
    def options(self) -> RequestOptions:
        """Options of each of its requests to the engine's client."""
        return {
            "priority": self.priority,
            "tenant": self.principal.tenant,
            "weight": self.principal.weight,
            "cache_salt": self.cache_salt,
        }

    def id_of(self, index: int) -> str:
        """The id of one of the prompts with the engine's client."""
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{index}"

    def grant(self, max_tokens: Sequence[int]) -> None:
        """Lower the `max_tokens` of each prompt to what the limits leave, unless the client has named one.

        Raises:
            InvalidRequestError: another parameter needs more.
        """
        if self.params.max_tokens is None:
            pairs = zip(self.prepared, max_tokens, strict=True)
            self.prepared = [prepared.with_max_tokens(most) for prepared, most in pairs]

    def bound_logprobs(self, info: EngineInfo) -> None:
        """Refuse to make more log-probabilities than `MAX_LOGPROBS`. If the client has named no `max_tokens`, it
        becomes as large as that allows. A beam search needs two of the engine's for each sequence in each step."""
        params = self.params
        if self.beam is not None and 2 * params.n > info.max_logprobs:
            raise InvalidRequestError(
                f"use_beam_search takes n up to {info.max_logprobs // 2} (half of max_logprobs), got {params.n}",
                param="n",
            )
        num_tokens = params.n * sum(self.prompt_lengths)  # each choice has its prompt's
        most_top = min(info.vocab_size, info.max_logprobs)  # -1 asks for as many

        def per_token(count: int) -> int:
            return 1 + (most_top if count == -1 else count)

        if params.prompt_logprobs is not None and num_tokens * per_token(params.prompt_logprobs) > MAX_LOGPROBS:
            raise invalid(
                "prompt_logprobs",
                f"is {params.prompt_logprobs} for {num_tokens} tokens of prompts, counted once for each sequence: at "
                f"most {MAX_LOGPROBS} log-probabilities are given, each token's own among them",
            )
        if params.logprobs is None:
            return
        name, count = "logprobs", params.logprobs
        if params.logprob_token_ids:
            name, count = "logprob_token_ids", len(params.logprob_token_ids)
        most = MAX_LOGPROBS // (self.num_sequences * per_token(count))
        if params.max_tokens is None:
            self.default_max_tokens = min(self.default_max_tokens or info.max_model_len, most)
        elif params.max_tokens > most:
            raise invalid(
                name,
                f"is {count} for {self.num_sequences} sequences of up to {params.max_tokens} "
                f"tokens: at most {MAX_LOGPROBS} log-probabilities are given, each token's own among them",
            )

    def demand(self) -> Demand:
        """Demand of the job, once it is prepared, on the tenant's limits."""
        return Demand(
            prompt_tokens=self.prompt_lengths,
            n=self.params.n,
            max_tokens=self.params.max_tokens if self.keeps_output else 0,
            room=tuple(prepared.params.max_tokens or 1 for prepared in self.prepared),
            max_tokens_field=self.max_tokens_field,
        )


class Event(NamedTuple):
    """New output of one of a job's prompts."""

    prompt_index: int
    output: RequestOutput
    """The tokens and texts since the previous event."""
