"""Request body of `/v1/responses`. The values of items and tools are checked by `conversation.py` and `translation.py`,
which name the path of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ....core.errors import InvalidRequestError, invalid
from ...body.bounds import MAX_MESSAGES, check_field
from ...body.foreign_fields import GENERATION_UNSUPPORTED, Unsupported
from ...body.lenient import LenientModel, shape_of
from ...body.reader import documented
from ..protocol import DecodingFields, Texts

MAX_METADATA = 16
"""Entries of `metadata`, as in OpenAI's API."""
MAX_METADATA_NAME = 64
"""Characters of an entry's name, likewise."""
MAX_METADATA_VALUE = 512
"""Characters of an entry's value, likewise."""


class ItemPart(LenientModel):
    """A part of an item's content, of whatever type."""

    type: str
    text: str
    refusal: str
    image_url: Any
    file_id: Any
    file_data: Any
    file_url: Any
    input_audio: Any


class InputItem(LenientModel):
    """An item of the input, of whatever type."""

    type: str
    role: str
    content: str | list[ItemPart]
    id: str
    status: str
    call_id: str
    name: str
    arguments: str | dict[str, Any]
    input: str
    output: str | list[ItemPart]
    summary: list[ItemPart]


class Tool(LenientModel):
    """A tool, of whatever type."""

    type: str
    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool


class TextConfig(LenientModel):
    """`text`."""

    format: dict[str, Any] | None = None


class ReasoningConfig(LenientModel):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(LenientModel):
    """`stream_options`, which ask for nothing here."""


def _described(model: type[LenientModel]) -> dict[str, Any]:
    """JSON schema of a list of these."""
    schema = documented(model)["requestBody"]["content"]["application/json"]["schema"]
    return {"type": "array", "items": schema | {"required": []}}


def _text_or_list(value: Any) -> Any:
    if isinstance(value, str | list):
        return value
    raise PydanticCustomError("input", "must be a string or a list of items")


Input = Annotated[
    Any,
    shape_of(str | list[InputItem]),
    AfterValidator(_text_or_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, _described(InputItem)]}),
]
Tools = Annotated[list[Any], shape_of(list[Tool]), WithJsonSchema(_described(Tool))]

_UNSUPPORTED = {
    **GENERATION_UNSUPPORTED,
    **dict.fromkeys(("conversation", "prompt"), Unsupported(("", {}))),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Unsupported(instead="max_output_tokens")),
    "context_management": Unsupported(([],)),
    "messages": Unsupported(([],), instead="input"),
    "reasoning_effort": Unsupported(advice="write 'reasoning': {'effort': ...}"),
    "response_format": Unsupported(({},), advice="write 'text': {'format': ...}"),
    "n": Unsupported((1,)),
    "logprobs": Unsupported((False,)),
    "top_logprobs": Unsupported((0,)),
}


class ResponsesRequest(DecodingFields):
    """`POST /v1/responses`."""

    unsupported: ClassVar = _UNSUPPORTED
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """Default: true."""
    background: bool | None = None
    include: Texts | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Ours, as in a chat."""

    @property
    def is_stored(self) -> bool:
        """True if the response can be retrieved later."""
        return self.store is not False

    def check(self) -> None:
        """See the base class."""
        if self.background:
            raise invalid("background", "is not supported: responses run while the client waits; stream them")
        if isinstance(self.input, list) and len(self.input) > MAX_MESSAGES:
            raise invalid("input", f"has {len(self.input)} entries; at most {MAX_MESSAGES} are allowed")
        if self.text is not None:
            check_field("text.format", self.text.format)
        check_metadata(self.metadata)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse more `metadata` than OpenAI's API takes.

    Raises:
        InvalidRequestError: too many entries, or too long ones.
    """
    entries = metadata or {}
    if len(entries) > MAX_METADATA:
        raise invalid("metadata", f"has {len(entries)} entries; at most {MAX_METADATA} are allowed")
    for name, value in entries.items():
        if len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                f"metadata: names have at most {MAX_METADATA_NAME} characters and values {MAX_METADATA_VALUE}",
                param="metadata",
            )
