"""Sampling parameters of a request, and the limits on them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .compat.unsupported_options import accepts_unsupported_options
from .compat.vllm_python import SAMPLING
from .errors import InvalidRequestError, invalid
from .parameter_checks import MAX_SEED as MAX_SEED
from .parameter_checks import check_ids, check_length, check_strings, plain_number
from .parameter_checks import check_integer as check_integer
from .parameter_checks import check_number as check_number
from .parameter_checks import check_text as check_text
from .parameter_checks import quote_for_error as quote_for_error
from .repetition import RepetitionDetectionParams, parse_repetition
from .structured_outputs import StructuredOutputsParams, parse

GREEDY_TEMPERATURE = 1e-5
"""Below it a request is greedy. `kernels.sampling` has the same number: neither may import the other."""

# Limits of one request's parameters, all of which are processed for every token.
MAX_TOP_K = 2**31 - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 100.0
"""Bounds within which a logit times or over the penalty stays in float32's range."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 8192
"""Characters of all stop strings together."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1000
MAX_BAD_WORD_CHARS = 16_384
"""Characters of all bad words together."""
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
"""Sequences of token ids of the bad words: each word at the start of a text, and after a space."""
MAX_LOGIT_BIASES = 1024
ENTRIES_A_TOKEN = 16_384
"""Entries of lists that take as long as one token of a small model, 0.4 ms on a CPU."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Most entries of `logprob_token_ids`, as in vLLM: the rank of each is counted over the vocabulary."""
MAX_MARK_TOKENS = 64
"""Most tokens of a mark that begins or ends the reasoning."""
LOGPROBS_A_TOKEN = 32
"""Log-probabilities that take as long as one token, sending and formatting included."""
MAX_ALLOWED_TOKEN_IDS = 1 << 18
"""The largest vocabularies have about as many tokens."""
POOLINGS = ("last", "mean", "cls")
"""Poolings of hidden states: of the last token, their mean, of the first token."""
CLASSIFY = "classify"
"""Pooling of the last token, which a classifier's score matrix turns into the probabilities of its labels."""
MAX_SALT_CHARS = 1024
"""Characters of a `cache_salt`, which is kept with every block of the prefix cache."""

_NUMBERS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "speculative"),
    "thinking_token_budget",
)
_SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)

_NO_DEFAULT_FOR_NONE = ("max_tokens", *_SWITCHES)
"""Fields whose None is not replaced by the default: for `max_tokens` it has a meaning, switches refuse it."""


class RequestOutputKind(Enum):
    """Contents of a request's outputs while it runs."""

    CUMULATIVE = 0
    """Each has all tokens so far."""
    DELTA = 1
    """Each has the new tokens."""
    FINAL_ONLY = 2
    """One, at the end."""


def _bias_token(key: object) -> int:
    """The token id that a key of `logit_bias` means; JSON has them as strings."""
    number = plain_number(key)
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
        number = int(key)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_SEED:
        raise InvalidRequestError(f"logit_bias: {quote_for_error(key)} is not a token id", param="logit_bias")
    return number


@accepts_unsupported_options(SAMPLING, keeps_none=_NO_DEFAULT_FOR_NONE)
@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request; the names are vLLM's and OpenAI's.

    Wrong values raise `InvalidRequestError` with the field in `param`. vLLM's other fields may be given at values that
    change nothing. Limits that depend on the model (vocabulary, context length) are checked when the request is
    admitted.

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
    """0.001 to 100."""
    seed: int | None = None
    """-1 means None: clients send it for "no seed"."""
    stop: str | list[str] | None = None
    """Stop strings: at most 64, of 8,192 characters together."""
    stop_token_ids: list[int] | None = None
    """Stop tokens: at most 1,024 ids."""
    bad_words: list[str] | None = None
    """Words that must not be generated: at most 1,000, of 16,384 characters together."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: up to `max_model_len`."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of top log-probabilities a generated token, in addition to the chosen token's own; from the raw logits.
    -1: the whole vocabulary, if the engine's `max_logprobs` allows it."""
    logprob_token_ids: list[int] | None = None
    """Tokens whose log-probabilities are given at each generated token, instead of the top ones: at most 128 ids. Then
    `logprobs` may be left out, or be their number."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    """Biases of logits: at most 1,024 tokens, -100 to 100 each."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated: at most 262,144 ids."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    speculative: bool | int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Kind of outputs of `LLMEngine.step` and `AsyncLLM.generate`; those of `LLM` are final."""
    pooling: str | None = None
    """"last", "mean", "cls" or "classify": pool the prompt's hidden states and generate nothing; set by `LLM.embed` and
    its kin."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the form of the answer; a mapping with its fields is accepted too."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; then the tokens of its end are forced. -1 and None: no bound."""
    thinking_start_token_ids: list[int] | None = None
    """Tokens that begin the reasoning, at most 64. If only `thinking_end_token_ids` are given, the answer begins with
    it; without both they are <think> and </think> if the model has these tokens."""
    thinking_end_token_ids: list[int] | None = None
    """Tokens that end the reasoning, at most 64."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End of the answer when it repeats itself; a mapping with the fields is accepted too."""
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Filled in at admission from `bad_words` with the model's tokenizer."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            setattr(self, name, plain_number(getattr(self, name)))
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = self.stop_token_ids if self.stop_token_ids is not None else []
        self.bad_words = self.bad_words if self.bad_words is not None else []
        self._check()
        self.stop, self.bad_words = list(self.stop), list(self.bad_words)
        if self.logprob_token_ids is not None:
            self.logprobs = 0  # none of the top ones
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if self.logit_bias is not None:
            self.logit_bias = {_bias_token(token): float(bias) for token, bias in self.logit_bias.items()}

    def _check(self) -> None:
        check_integer("n", self.n, 1, 128)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_integer("top_k", self.top_k, -1, MAX_TOP_K)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        if self.seed is not None:
            check_integer("seed", self.seed, -MAX_SEED - 1)
        check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, f"must be true or false, got {quote_for_error(getattr(self, name))}")
        self._check_lengths()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise invalid("allowed_token_ids", "must not be empty")
        self._check_logit_bias()
        self._check_logprob_token_ids()
        self._check_thinking()
        self.repetition_detection = parse_repetition(self.repetition_detection)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            self.structured_outputs = parse(self.structured_outputs)
        if self.pooling is not None and not (isinstance(self.pooling, str) and self.pooling in (*POOLINGS, CLASSIFY)):
            named = ", ".join((*POOLINGS, CLASSIFY))
            raise invalid("pooling", f"must be one of {named}, got {quote_for_error(self.pooling)}")
        try:
            self.output_kind = RequestOutputKind(getattr(self.output_kind, "value", self.output_kind))
        except ValueError as error:
            raise invalid(
                "output_kind", f"must be a RequestOutputKind, got {quote_for_error(self.output_kind)}"
            ) from error
        if self.speculative is not None and not isinstance(self.speculative, bool):
            check_integer("speculative", self.speculative, 0)
        if not isinstance(self.bad_words_token_ids, list):
            raise invalid("bad_words_token_ids", "must be a list")
        check_length("bad_words_token_ids", self.bad_words_token_ids, MAX_BAD_WORD_SEQUENCES)
        for word in self.bad_words_token_ids:
            check_ids("bad_words_token_ids", word)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise invalid("logit_bias", "must map token ids to numbers")
        check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        for token, bias in self.logit_bias.items():
            _bias_token(token)
            check_number("logit_bias", plain_number(bias), -100.0, 100.0)

    def _check_logprob_token_ids(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        check_ids("logprob_token_ids", ids, MAX_LOGPROB_TOKEN_IDS)
        self.logprob_token_ids = list(ids) or None
        if ids and self.logprobs not in (None, 0, len(ids)):
            raise invalid("logprobs", f"must be the number of logprob_token_ids, {len(ids)}; got {self.logprobs}")

    def _check_thinking(self) -> None:
        if self.thinking_token_budget is not None:
            check_integer("thinking_token_budget", self.thinking_token_budget, -1)
        for name in ("thinking_start_token_ids", "thinking_end_token_ids"):
            ids = getattr(self, name)
            if ids is not None:
                check_ids(name, ids, MAX_MARK_TOKENS)
                setattr(self, name, list(ids) or None)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def only_scores(self) -> bool:
        """True when the request wants the prompt's log-probabilities with at most one generated token, or its hidden
        states: such a prompt may fill the whole context."""
        return (self.prompt_logprobs is not None and self.max_tokens == 1) or self.pooling is not None

    @property
    def reads_prompt(self) -> bool:
        """True when the prompt's log-probabilities or pooled hidden states are wanted."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @property
    def reads_whole_prompt(self) -> bool:
        """True when every token of the prompt must be computed, even if the prefix cache has its KV."""
        return self.prompt_logprobs is not None or self.pooling in ("mean", "cls")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def edits_logits(self) -> bool:
        """True when a parameter changes single logits: a mask, a bias or a penalty."""
        return (
            self.allowed_token_ids is not None
            or bool(self.bad_words_token_ids)
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or self.structured_outputs is not None
            or self.thinking_token_budget is not None
            or self.penalises
        )

    @property
    def edits_read_tokens(self) -> bool:
        """True when the host must know the last tokens for these edits."""
        return (
            self.structured_outputs is not None
            or self.thinking_token_budget is not None
            or any(len(word) > 1 for word in self.bad_words_token_ids)
        )

    @property
    def penalises(self) -> bool:
        """True when a penalty depends on the tokens that the sequence has."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def token_cost(self) -> float:
        """Cost of choosing one token, as a multiple of the whole cost of a plain token. Long lists and
        log-probabilities are processed for each token."""
        entries = len(self.allowed_token_ids or ()) + len(self.logit_bias or ()) + len(self.bad_words_token_ids)
        logprobs = len(self.logprob_token_ids or ()) or self.logprobs or 0
        return 1.0 + entries / ENTRIES_A_TOKEN + logprobs / LOGPROBS_A_TOKEN

    @property
    def max_drafts(self) -> int | None:
        """The request's cap on drafts per step; None without one."""
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

    def sibling(self, seed: int | None, *, is_first: bool) -> SamplingParams:
        """These parameters for one of `n` sequences: another seed, `n` = 1. The first one reports the prompt for all,
        so that the others take its KV. Shares the lists, and is not checked again."""
        new = copy.copy(self)
        new.n, new.seed = 1, seed
        if not is_first and not self.only_scores:  # a prompt that fills the context is scored, and gets no token
            new.prompt_logprobs = None
        return new
