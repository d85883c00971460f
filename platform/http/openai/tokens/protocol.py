"""Request bodies of the routes of token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from ....core.errors import invalid
from ....core.sampling_params import SamplingParams
from ...body.foreign_fields import GENERATION_UNSUPPORTED, Unsupported
from ...body.lenient import LenientModel
from ...serving_state import valid_request_id
from ..protocol import ModelFields, SamplingValues, StreamOptions, TokenIds

_RENDERED = ("frame", "ends_list")
"""Fields of a constraint that only the chat API sets, and that its rendered requests bring back."""


class GenerateParams(SamplingValues):
    """`sampling_params` of a generate request. The server's defaults do not apply to what it leaves out, except to
    `max_tokens`: `render` has applied them."""

    unsupported: ClassVar = {
        **GENERATION_UNSUPPORTED,
        **dict.fromkeys(("flat_logprobs", "skip_reading_prefix_cache"), Unsupported((False,))),
        "extra_args": Unsupported(({},)),
    }
    logprobs: int | None = None
    detokenize: bool | None = None
    """Without an effect, like `skip_special_tokens`: the answer has no text."""

    def sampling_params(self, defaults: Mapping[str, Any], **changes: Any) -> SamplingParams:
        """See the base class."""
        given = self.structured_outputs or {}
        rendered = {name: given[name] for name in _RENDERED if given.get(name) is not None}
        if rendered:
            self.structured_outputs = {name: value for name, value in given.items() if name not in _RENDERED}
        params = super().sampling_params(defaults, **changes)
        if rendered and params.structured_outputs is not None:
            if not isinstance(rendered.get("ends_list", False), bool):
                raise invalid("structured_outputs", "ends_list must be true or false")
            params.structured_outputs = replace(params.structured_outputs, **rendered)
        params.detokenize = bool(params.stop_strings)  # they are looked for in the text
        return params


class GenerateRequest(ModelFields):
    """`POST /inference/v1/generate`."""

    unsupported: ClassVar = {
        **GENERATION_UNSUPPORTED,
        **dict.fromkeys(GenerateParams.model_fields, Unsupported(advice="write it in 'sampling_params'")),
        **dict.fromkeys(("prompt", "messages", "input_ids"), Unsupported(("", []), advice="write 'token_ids'")),
        "features": Unsupported(({},)),
    }
    token_ids: TokenIds
    sampling_params: GenerateParams = Field(default_factory=GenerateParams)
    request_id: str | None = None
    """Comes back in the answer; the engine and the ledger have an id of their own, which is unique."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """See the base class."""
        if not self.token_ids:
            raise invalid("token_ids", "must not be empty")
        if self.request_id is not None and not valid_request_id(self.request_id):
            raise invalid("request_id", "must be 1 to 256 printable ASCII characters without spaces")
        params = self.sampling_params
        if self.stream and params.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not available with stream")
        params.check_entries(params.n or 1)


class GeneratedChoice(LenientModel):
    """A choice of a generate response."""

    index: int
    token_ids: TokenIds
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(LenientModel):
    """An answer of `/inference/v1/generate`, as clients give it back."""

    request_id: str | None = None
    choices: list[GeneratedChoice]
    prompt_logprobs: list[Any] | None = None


class _DerenderRequest(LenientModel):
    unsupported: ClassVar = {
        "stream": Unsupported((False,), advice="send whole answers"),
        "generate_chunk": Unsupported(advice="send whole answers"),
        "stream_state": Unsupported(({},), advice="send whole answers"),
    }
    model: str | None = None


class DerenderChatRequest(_DerenderRequest):
    """`POST /v1/chat/completions/derender`."""

    generate_response: GenerateResponse
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    """Prompt of the answer; if they are not given, `chat_request` is rendered again to see whether its prompt has begun
    the reasoning."""
    chat_request: dict[str, Any] | None = None
    """The chat that was rendered. Without it the whole text is content."""


class DerenderCompletionRequest(_DerenderRequest):
    """`POST /v1/completions/derender`."""

    generate_responses: list[GenerateResponse]
    prompt_tokens: list[int] | None = None
    completion_request: dict[str, Any] | None = None
