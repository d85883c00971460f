"""Request bodies of the routes that generate and tokenize. Types are strict; `body.lenient` converts what clients write
and deals with fields that a model does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...core.errors import InvalidRequestError, invalid
from ...core.sampling_params import SamplingParams
from ..body.foreign_fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, TEMPLATE_UNSUPPORTED, Unsupported
from ..body.lenient import LenientModel, shape_of
from .chat_messages import ChatMessage
from .structured_outputs import parse_constraint

MAX_PROMPTS = 1024
"""Prompts in one request."""
MAX_SEQUENCES = 1024
"""Prompts times `n`: the sequences that one request may ask for."""
MAX_PROMPTS_X_BAD_WORDS = 4096
"""Largest number of prompts times bad words: they are checked for each prompt, and nothing else is served meanwhile."""
MAX_SEQUENCES_X_ENTRIES = 1 << 19
"""Entries of one list parameter, which are checked for each prompt and sent to the engine for each sequence."""


def _prompt(value: Any) -> Any:
    """A string, a list of strings, token ids, or a list of lists of token ids; never empty lists."""
    if isinstance(value, str) or (isinstance(value, list) and value and _uniform(value)):
        return value
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _uniform(value: list[Any]) -> bool:
    if all(type(item) is int for item in value) or all(type(item) is str for item in value):
        return True
    return all(type(item) is list and item and all(type(token) is int for token in item) for item in value)


def _false_is_null(value: Any) -> Any:
    return None if value is False else value


Prompt = Annotated[Any, shape_of(str | list[int | str | list[int]]), AfterValidator(_prompt)]
Messages = Annotated[list[Any], shape_of(list[ChatMessage])]
"""Messages, checked by `chat_messages`."""
# Validation ends at the first wrong entry: a list of a wrong type gets one error.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(LenientModel):
    """`stream_options` of both APIs."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TemplateFields(LenientModel):
    """Options for making a prompt of messages."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Default: unless the final message is continued."""
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Default: true for a plain prompt, false for messages, whose template writes them."""
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_effort: str | None = None
    """Given to the chat template, in which "none" also means that `enable_thinking` is false."""


class AdapterPart(LenientModel):
    """One adapter of a weighted sum."""

    unsupported: ClassVar = {"scale": Unsupported(instead="weight")}
    name: str
    weight: float = 1.0


class ModelFields(LenientModel):
    """Fields of all routes that run the model. A null means that the field is not given."""

    model: str | None = None
    """The base model, an adapter, or a weighted sum of adapters as "a:0.7+b:0.3"."""
    adapters: Annotated[list[str | AdapterPart], Field(fail_fast=True)] | None = None
    """Ours: the weighted sum as a list, for a `model` that is the base or not given. A bare name has weight 1."""
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Refuse wrong combinations of fields."""


class DecodingValues(LenientModel):
    """Sampling parameters of all routes that generate text."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    speculative: bool | int | None = None
    structured_outputs: dict[str, Any] | None = None


class RepetitionDetection(LenientModel):
    """`repetition_detection`; see `RepetitionDetectionParams`."""

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class SamplingValues(DecodingValues):
    """Sampling parameters of `/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate`."""

    n: int | None = None
    bad_words: Texts | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    logprob_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    thinking_start_token_ids: TokenIds | None = None
    thinking_end_token_ids: TokenIds | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    """SGLang's name, like the next one."""
    ebnf: str | None = None

    def check_entries(self, num_sequences: int) -> None:
        """Refuse long lists for many sequences."""
        for name in ("bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"):
            entries = len(getattr(self, name) or ())
            if entries * num_sequences > MAX_SEQUENCES_X_ENTRIES:
                raise invalid(
                    name,
                    f"has {entries} entries for {num_sequences} sequences; at most {MAX_SEQUENCES_X_ENTRIES} are "
                    "taken, counted once for each sequence",
                )

    def sampling_params(self, defaults: Mapping[str, Any], **changes: Any) -> SamplingParams:
        """The sampling parameters requested over the `defaults`, with `changes` on top; InvalidRequestError names a
        wrong one. Without `max_tokens` in the request it is None, and the job decides, prompt by prompt."""
        given = {name: getattr(self, name) for name in self.model_fields_set & _SAMPLING_NAMES}
        if self.repetition_detection is not None:
            given["repetition_detection"] = self.repetition_detection.model_dump(exclude_none=True)
        constraint = parse_constraint({name: getattr(self, name) for name in self.model_fields_set})
        given.update(changes)
        if constraint is not None:
            if changes.get("structured_outputs") is not None:
                raise InvalidRequestError(
                    f"{constraint.source} and a forced call exclude each other", param=constraint.source
                )
            given["structured_outputs"] = constraint
        known = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, "max_tokens": None, **known})


_SAMPLING_NAMES = frozenset(SamplingParams.__dataclass_fields__)


class DecodingFields(ModelFields, DecodingValues):
    """Fields of `/v1/completions`, `/v1/chat/completions` and `/v1/responses`."""

    stream: bool | None = None


class SamplingFields(DecodingFields, SamplingValues):
    """Fields of both `/v1/completions` and `/v1/chat/completions`."""

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None
    """Ours: the answer carries `metrics`, with `speculative_decoding` inside."""
    return_draft_status: bool | None = None
    """Ours: each choice, also in a stream, has `draft_status` ("drafted" or "sampled") and `rejected_drafts` (a number)
    for each of its tokens."""

    def check(self) -> None:
        """Refuse wrong combinations of fields."""
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not available with stream")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of", "is supported only when it equals n")
        self.check_entries(self.n or 1)


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    unsupported = COMPLETION_UNSUPPORTED
    prompt: Prompt
    """The prompt in one of four forms; read it through `prompts`."""
    add_special_tokens: bool | None = None
    logprobs: Annotated[int | None, BeforeValidator(_false_is_null)] = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """`prompt` in its four forms as a list of prompts."""
        return list_prompts(self.prompt)

    def check(self) -> None:
        """See the base class."""
        super().check()
        count, n = len(self.prompts), self.n or 1
        if self.logprob_token_ids and self.logprobs is None:
            raise invalid("logprob_token_ids", "needs logprobs: their number, or 0")
        if count > MAX_PROMPTS:
            raise invalid("prompt", f"has {count} prompts; at most {MAX_PROMPTS} are taken")
        words = len(self.bad_words or ())
        if count > 1 and count * words > MAX_PROMPTS_X_BAD_WORDS:
            raise invalid(
                "bad_words",
                f"has {words} entries for {count} prompts; at most {MAX_PROMPTS_X_BAD_WORDS} are taken, counted once "
                "for each prompt",
            )
        if count > 1 and count * n > MAX_SEQUENCES:
            raise invalid(
                "n", f"is {n} for {count} prompts, together {count * n} sequences; at most {MAX_SEQUENCES} are taken"
            )
        self.check_entries(count * n)
        if self.echo and self.stream and (self.logprobs is not None or self.max_tokens == 0):
            raise InvalidRequestError("echo with logprobs or max_tokens 0 is not available with stream", param="echo")


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    unsupported = CHAT_UNSUPPORTED
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    """Older form of `tools`, like the next one of `tool_choice`; see `tools.functions`."""
    function_call: str | dict[str, Any] | None = None

    def check(self) -> None:
        """See the base class."""
        super().check()
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise invalid(name, "needs logprobs to be true")
        num_given = len(self.logprob_token_ids or ())
        if num_given and self.top_logprobs not in (None, 0, num_given):
            raise invalid("top_logprobs", f"must be the number of logprob_token_ids, {num_given}")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )


def list_prompts(given: Any) -> list[str | list[int]]:
    """A prompt in its four forms as a list of prompts."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: a prompt, or messages under the chat template."""

    unsupported = TEMPLATE_UNSUPPORTED
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(LenientModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
