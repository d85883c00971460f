"""Requests of the Messages API as chat requests.

A user's message with results of tools becomes one message with the role "tool" for each result, and a user's message
for the rest. Neighbours of one role become one message, as in Anthropic's API.
"""

from __future__ import annotations

import json
from typing import Any

from ...core.errors import InvalidRequestError, invalid
from ...core.text import shorten
from ..openai.answer import renamed
from ..openai.chat_messages import check_role, tower_hint
from ..openai.protocol import ChatCompletionRequest
from .protocol import CountTokensRequest, MessagesRequest, OutputConfig, ToolChoice

Message = dict[str, Any]
"""Message as chat templates read it; see `chat_messages.normalize_messages`."""

_ROLES = ("user", "assistant", "system")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks that a message of a role may have."""
_NAMES = {"response_format": "output_config.format", ".function.parameters": ".input_schema", ".function": ""}
"""Names in a chat's errors, and what they are called here."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_messages(body: CountTokensRequest) -> list[Message]:
    """Conversation of a request.

    Raises:
        InvalidRequestError: a message cannot be served; `param` names the place, such as "messages[0].content[1]".
    """
    if not body.messages:
        raise invalid("messages", "must not be empty")
    result: list[Message] = []
    if body.system is not None:
        system = _blocks(body.system, "system")
        result.append({"role": "system", "content": _texts(system, "system", "system")})
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        role, blocks = _checked(message, place)
        for part in _split(role, blocks, f"{place}.content"):
            if result and result[-1]["role"] == part["role"] and part["role"] in ("user", "assistant"):
                _append(result[-1], part)
            else:
                result.append(part)
    for message in result:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    if result[-1].get("tool_calls"):
        place = f"messages[{len(body.messages) - 1}].content"
        raise InvalidRequestError(f"{place}: results must follow tool_use blocks, in a user's message", param=place)
    return result


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """Chat request with all but the messages, which are those of `chat_messages`.

    Raises:
        InvalidRequestError: a tool or the choice is wrong; `param` names it.
    """
    fields: dict[str, Any] = {"messages": []}
    choice = body.tool_choice
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if choice is not None:
        fields["tool_choice"] = _choice(choice)
        one_only = choice.disable_parallel_tool_use
        fields["parallel_tool_calls"] = None if one_only is None else not one_only
    output = body.output_config or OutputConfig()
    if output.format is not None:
        fields["response_format"] = _format(output.format)
    fields["reasoning_effort"] = output.effort
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    if body.thinking is not None:
        thinks = {"enable_thinking": body.thinking.type != "disabled"}
        fields["chat_template_kwargs"] = thinks | (body.chat_template_kwargs or {})
    last = body.messages[-1] if body.messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":  # the answer continues its text
        fields["continue_final_message"] = True
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "speculative")
        fields |= {name: getattr(body, name) for name in names} | {"stop": body.stop_sequences}
    given = {name: value for name, value in fields.items() if value is not None}
    return ChatCompletionRequest(**given, priority=body.priority, cache_salt=body.cache_salt)


def in_own_names(error: InvalidRequestError) -> InvalidRequestError:
    """The error with this API's names of a chat's fields."""
    return renamed(error, _NAMES | ({"stop": "stop_sequences"} if error.param == "stop" else {}))


# --- messages ---------------------------------------------------------------------------------------------------------


def _checked(message: Any, place: str) -> tuple[str, list[dict[str, Any]]]:
    """Role and blocks of a message."""
    return check_role(message, place, _ROLES), _blocks(message.get("content"), f"{place}.content")


def _blocks(content: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(place, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{place}[{index}]", "must be an object with a type")
    return content


def _texts(blocks: list[dict[str, Any]], role: str, place: str) -> list[dict[str, str]]:
    """Text parts of blocks that are nothing else."""
    return [
        {"type": "text", "text": _text(_allowed(block, role, f"{place}[{index}]"), "text", f"{place}[{index}]")}
        for index, block in enumerate(blocks)
    ]


def _allowed(block: dict[str, Any], role: str, place: str) -> dict[str, Any]:
    """The block, of a type that the role may have."""
    if block["type"] not in _BLOCKS[role]:
        kinds = ", ".join(_BLOCKS[role])
        raise InvalidRequestError(
            f"{place}: blocks of type {shorten(repr(block['type']))} are not supported here, only {kinds}"
            f"{tower_hint(block['type'])}",
            param=place,
        )
    return block


def _text(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", "must be a string")
    return value


def _split(role: str, blocks: list[dict[str, Any]], place: str) -> list[Message]:
    """Chat messages of one message, in the order of its blocks."""
    result: list[Message] = []
    own: Message | None = None
    for index, block in enumerate(blocks):
        where = f"{place}[{index}]"
        kind = _allowed(block, role, where)["type"]
        if kind == "tool_result":
            result.append(_result(block, where))
            own = None
            continue
        if own is None:
            own = {"role": role, "content": []}
            result.append(own)
        if kind == "text":
            own["content"].append({"type": "text", "text": _text(block, "text", where)})
        elif kind == "thinking":
            own.setdefault("reasoning_content", []).append(_text(block, "thinking", where))
        elif kind == "tool_use":
            own.setdefault("tool_calls", []).append(_call(block, where))
    return result or [{"role": role, "content": []}]


def _append(message: Message, more: Message) -> None:
    """Add a message of the same role."""
    message["content"] += more["content"]
    for name in ("reasoning_content", "tool_calls"):
        if name in more:
            message.setdefault(name, []).extend(more[name])


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.input", "must be an object")
    function = {"name": _text(block, "name", place), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _text(block, "id", place), "type": "function", "function": function}


def _result(block: dict[str, Any], place: str) -> Message:
    """Message of a tool's result. Chat templates have no mark of errors: the text says it."""
    content = "" if block.get("content") is None else block["content"]
    parts = _texts(_blocks(content, f"{place}.content"), "system", f"{place}.content")
    if block.get("is_error"):
        parts = [{"type": "text", "text": "Error: " + "\n".join(part["text"] for part in parts)}]
    return {"role": "tool", "content": parts, "tool_call_id": _text(block, "tool_use_id", place)}


# --- tools and forms --------------------------------------------------------------------------------------------------


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(place, "must be an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequestError(
            f"{place}: tools of type {shorten(repr(kind))} are not supported, only 'custom'", param=place
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{place}.input_schema", "must be a JSON schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "is missing")
    return {"type": "function", "function": {"name": choice.name}}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise invalid("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
