"""Outputs of requests, as users get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .lora_request import LoRA
from .messages import SpeculationCounts


class Logprob(NamedTuple):
    """Log-probability of one token under the raw logits (before any sampling parameter)."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None = None
    """The token's part of the text. A character belongs to the token that completes it; the tokens before have "". An
    alternative that is part of a character is written "bytes:\\xe4"."""
    token_bytes: bytes | None = None
    """The token's part of the text's UTF-8; empty for tokens that the text leaves out. None without texts."""


@dataclass(slots=True, kw_only=True)
class RequestMetrics(SpeculationCounts):
    """Times in seconds of the monotonic clock of the process that served the request, and counts."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    """Seconds from the arrival to the first step of the first sequence."""
    adapter_digest: str = ""
    """Digest of the adapter's version that it runs on, in hexadecimal; "" before the first token and without one."""

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the arrival to the first token; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_in_queue(self) -> float:
        """The same as `queue_seconds`, under vLLM's name."""
        return self.queue_seconds


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` sequences of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """"stop", "length", "repetition" or "abort"; None while running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, or "repetition_detected"; None for the end-of-sequence token."""
    drafted: list[bool] | None = None
    """Aligned with `token_ids`: True for a draft that the model accepted, False for a token that it sampled."""
    rejected_drafts: list[int] | None = None
    """Aligned with `token_ids`: how many drafts the step that ended with this token rejected; the token is at the
    position of the first of them."""

    def finished(self) -> bool:
        """True when this sequence is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's outputs so far; `finished` once every sequence is complete."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One entry a prompt token; the first is None."""
    lora_request: LoRA | None = None
    pooled: list[float] | None = None
    """[H] pooled hidden states of the prompt, not normalised, of a request with `SamplingParams.pooling`; [labels]
    probabilities with "classify"."""
    encoder_prompt = encoder_prompt_token_ids = multi_modal_placeholders = kv_transfer_params = None
    """Fields of vLLM's outputs that prompts of text alone do not have."""

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None without metrics."""
        return None if self.metrics is None else self.metrics.num_cached_tokens
