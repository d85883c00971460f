"""How the tokens of one request are chosen."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import InvalidRequestError

MAX_SEED = 2**63 - 1


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse `value` unless it is a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}", param=name)
    if value > high or value < low or (low_open and value == low):
        opening = "(" if low_open else "["
        raise InvalidRequestError(f"{name} must be in {opening}{low}, {high}], got {value!r}", param=name)


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse `value` unless it is an integer of at least `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {limit}, got {value}", param=name)


def _token_ids(name: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {value!r}", param=name)
    for item in value:
        _integer(name, item, 0)


def _strings(name: str, value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequestError(f"{name} must be a list of non-empty strings, got {value!r}", param=name)


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request; the names are vLLM's and OpenAI's.

    Wrong values raise `InvalidRequestError` with the field in `param`. Limits that depend on the model
    (vocabulary, context length) are checked when the request is admitted.

    `speculative` is ours: `None` follows the engine, `False` (or 0) switches drafting off for this request,
    an integer caps the drafts a step. It never changes the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: up to `max_model_len`."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of top log-probabilities a generated token, beside the chosen token's own; from the raw logits."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    speculative: bool | int | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Filled in at admission from `bad_words` with the model's tokenizer."""

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = self.stop_token_ids if self.stop_token_ids is not None else []
        self.bad_words = self.bad_words if self.bad_words is not None else []
        self._check()
        if self.top_k == -1:
            self.top_k = 0
        if self.logit_bias is not None:
            self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}

    def _check(self) -> None:
        _integer("n", self.n, 1, 128)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _strings("stop", self.stop)
        _token_ids("stop_token_ids", self.stop_token_ids)
        _strings("bad_words", self.bad_words)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        self._check_logit_bias()
        if self.speculative is not None and not isinstance(self.speculative, bool):
            _integer("speculative", self.speculative, 0)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
        for token, bias in self.logit_bias.items():
            if not str(token).lstrip("-").isdigit() or int(token) < 0:
                raise InvalidRequestError(f"logit_bias: {token!r} is not a token id", param="logit_bias")
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def max_drafts(self) -> int | None:
        """The cap on drafts a step that this request asks for; None when it asks for none."""
        if self.speculative is None or self.speculative is True:
            return None
        return int(self.speculative)

    def clone(self, **changes: Any) -> SamplingParams:
        """A deep copy with `changes` applied and checked again."""
        new = copy.deepcopy(self)
        for name, value in changes.items():
            setattr(new, name, value)
        new.__post_init__()
        return new
