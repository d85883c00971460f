"""Sampling parameters of a request, and the limits on them."""

from __future__ import annotations

import contextlib
import copy
import numbers
import reprlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .compat.unsupported_options import accepts_unsupported_options
from .compat.vllm_python import SAMPLING
from .errors import InvalidRequestError, invalid
from .structured_outputs import StructuredOutputsParams, parse

MAX_SEED = 2**63 - 1
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


def quote_for_error(value: object) -> str:
    """Return `value` as short text for an error message."""
    if isinstance(value, str | bytes):
        value = value[:100]
    try:
        text = repr(value) if isinstance(value, str | bytes) else reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"an overlong {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."


def _plain(value: Any) -> Any:
    """A number of numpy, or of another library, as Python's own; everything else as it is."""
    if type(value) in (int, float, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):  # a fraction too large for a float
            return float(value)
    return value


def check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse `value` unless it is a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(name, f"must be a number, got {quote_for_error(value)}")
    if not low <= value <= high or (low_open and value == low):  # nan is refused
        opening = "(" if low_open else "["
        raise invalid(name, f"must be in {opening}{low}, {high}], got {quote_for_error(value)}")


def check_integer(name: str, value: object, low: int, high: int = MAX_SEED) -> None:
    """Refuse `value` unless it is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"must be an integer, got {quote_for_error(value)}")
    if not low <= value <= high:
        limit = f"at least {low}" if value < low and high == MAX_SEED else f"in [{low}, {high}]"
        raise invalid(name, f"must be {limit}, got {quote_for_error(value)}")


def check_text(name: str, value: object, most: int | None = None) -> None:
    """Refuse `value` unless it is a string that UTF-8 can hold, one without lone surrogates, of at most `most`
    characters."""
    if not isinstance(value, str):
        raise invalid(name, f"must be a string, got {quote_for_error(value)}")
    if most is not None and len(value) > most:
        raise invalid(name, f"has {len(value)} characters; at most {most} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"is not valid Unicode text: {error.reason}") from error


def _length(name: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise invalid(name, f"has {len(value)} entries; at most {most} are allowed")


def _token_ids(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise invalid(name, f"must be a list of token ids, got {quote_for_error(value)}")
    if most is not None:
        _length(name, value, most)
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) <= MAX_SEED:
        return
    for item in value:
        check_integer(name, item, 0)


def _strings(name: str, value: object, most: int, most_chars: int) -> None:
    if not isinstance(value, list | tuple):
        raise invalid(name, f"must be a list of non-empty strings, got {quote_for_error(value)}")
    _length(name, value, most)
    chars = 0
    for item in value:
        if item == "":
            raise invalid(name, "must be a list of non-empty strings, got an empty one")
        check_text(name, item, most_chars)
        chars += len(item)
    if chars > most_chars:
        raise invalid(name, f"has {chars} characters in all; at most {most_chars} are allowed")


def _bias_token(key: object) -> int:
    """The token id that a key of `logit_bias` means; JSON has them as strings."""
    number = _plain(key)
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
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Filled in at admission from `bad_words` with the model's tokenizer."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            setattr(self, name, _plain(getattr(self, name)))
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = self.stop_token_ids if self.stop_token_ids is not None else []
        self.bad_words = self.bad_words if self.bad_words is not None else []
        self._check()
        self.stop, self.bad_words = list(self.stop), list(self.bad_words)
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
        _strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, f"must be true or false, got {quote_for_error(getattr(self, name))}")
        self._check_lengths()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise invalid("allowed_token_ids", "must not be empty")
        self._check_logit_bias()
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
        _length("bad_words_token_ids", self.bad_words_token_ids, MAX_BAD_WORD_SEQUENCES)
        for word in self.bad_words_token_ids:
            _token_ids("bad_words_token_ids", word)

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
        _length("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        for token, bias in self.logit_bias.items():
            _bias_token(token)
            check_number("logit_bias", _plain(bias), -100.0, 100.0)

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
            or self.penalises
        )

    @property
    def edits_read_tokens(self) -> bool:
        """True when the host must know the last tokens for these edits."""
        return self.structured_outputs is not None or any(len(word) > 1 for word in self.bad_words_token_ids)

    @property
    def penalises(self) -> bool:
        """True when a penalty depends on the tokens that the sequence has."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def token_cost(self) -> float:
        """Cost of choosing one token, as a multiple of the whole cost of a plain token. Long lists and
        log-probabilities are processed for each token."""
        entries = len(self.allowed_token_ids or ()) + len(self.logit_bias or ()) + len(self.bad_words_token_ids)
        return 1.0 + entries / ENTRIES_A_TOKEN + (self.logprobs or 0) / LOGPROBS_A_TOKEN

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
