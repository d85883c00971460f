"""Request bodies of the Messages API. The values of messages and tools are checked by `translation`, which names the
path of what is wrong."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from ..body.foreign_fields import GENERATION_UNSUPPORTED, Unsupported
from ..body.lenient import LenientModel, shape_of
from ..openai.protocol import ModelFields, Texts


class ResultPart(LenientModel):
    """A part of a tool's result, of whatever type."""

    type: str
    text: str
    source: Any
    tool_name: Any


class ContentBlock(LenientModel):
    """A block of a message's content, of whatever type."""

    type: str
    text: str
    thinking: str
    signature: Any
    data: Any
    source: Any
    id: str
    name: str
    input: Any
    tool_use_id: str
    content: str | list[ResultPart]
    is_error: bool


class InputMessage(LenientModel):
    """A message of the conversation."""

    role: str
    content: str | list[ContentBlock]


class Tool(LenientModel):
    """A tool, of whatever type."""

    type: str
    name: str
    description: str
    input_schema: Any
    strict: bool


class ToolChoice(LenientModel):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(LenientModel):
    """`thinking`. A budget is not kept: only `max_tokens` bounds an answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(LenientModel):
    """`output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(LenientModel):
    """`metadata`."""

    user_id: str | None = None


Messages = Annotated[list[Any], shape_of(list[InputMessage])]
Blocks = Annotated[Any, shape_of(str | list[ContentBlock])]
Tools = Annotated[list[Any], shape_of(list[Tool])]

_UNSUPPORTED = {
    **GENERATION_UNSUPPORTED,
    "stop": Unsupported(([], ""), instead="stop_sequences"),
    "max_tokens_to_sample": Unsupported(instead="max_tokens"),
    "n": Unsupported((1,)),
    "logprobs": Unsupported((False,)),
    "response_format": Unsupported(({},), advice="write 'output_config'"),
    "prompt": Unsupported(("",), advice="write 'messages'"),
    "container": Unsupported(("",)),
    "mcp_servers": Unsupported(([],)),
}


class CountTokensRequest(ModelFields):
    """`POST /v1/messages/count_tokens`."""

    unsupported: ClassVar = _UNSUPPORTED
    messages: Messages
    system: Blocks = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Ours, as in a chat."""


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: Texts | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    seed: int | None = None
    """Ours, like `speculative`."""
    speculative: bool | int | None = None
