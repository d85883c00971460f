"""Chat messages of the OpenAI API, converted to the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ...core.errors import InvalidRequestError, invalid
from ...core.text import shorten
from ..body.foreign_fields import MESSAGE_UNSUPPORTED
from ..body.lenient import LenientModel

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class FunctionCall(LenientModel):
    """A function and its arguments, as an assistant called it."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(LenientModel):
    """One of an assistant's `tool_calls`."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ContentPart(LenientModel):
    """A part of a message's content, of whatever type."""

    type: str
    text: str
    refusal: str
    image_url: Any
    video_url: Any
    audio_url: Any
    input_audio: Any
    file: Any


class ChatMessage(LenientModel):
    """Fields of a message. Their values are checked by `normalize_messages`, which names the path of what is wrong."""

    unsupported = MESSAGE_UNSUPPORTED
    role: str
    content: str | list[ContentPart]
    name: str
    refusal: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    function_call: FunctionCall


def normalize_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Check `messages`, from which `lenient` has taken unknown fields, and write them as templates read them: role,
    content and, if given, name, reasoning_content, tool_calls and tool_call_id.

    Raises:
        InvalidRequestError: `param` names the place, such as "messages[0].content[1]".
    """
    if not messages:
        raise invalid("messages", "must not be empty")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def num_chars(messages: list[dict[str, Any]]) -> int:
    """Number of characters that a template writes for normalized messages."""
    return sum(
        _num_chars(message["content"])
        + len(message.get("reasoning_content", ""))
        + sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
        for message in messages
    )


def _num_chars(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def check_role(message: Any, place: str, roles: Collection[str]) -> str:
    """Role of a message, one of `roles`."""
    if not isinstance(message, dict):
        raise invalid(place, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise invalid(f"{place}.role", f"must be one of {', '.join(roles)}; got {shorten(repr(role))}")
    return role


def _message(message: Any, place: str) -> dict[str, Any]:
    role = _ROLES[check_role(message, place, _ROLES)]
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = message.get("refusal") or ""  # so says the API of a message that had no text
    result: dict[str, Any] = {"role": role, "content": parse_content(content, f"{place}.content")}
    for name in ("name", *_FIELDS_BY_ROLE.get(role, ())):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise invalid(f"{place}.{name}", "must be a string")
        result[_RENAMED.get(name, name)] = value
    calls = _tool_calls(message, place)
    if calls and role != "assistant":
        raise InvalidRequestError(f"{place}: only an assistant's message has tool calls", param=f"{place}.tool_calls")
    return result | ({"tool_calls": calls} if calls else {})


_FIELDS_BY_ROLE = {"assistant": ("reasoning", "reasoning_content"), "tool": ("tool_call_id",)}
_RENAMED = {"reasoning": "reasoning_content"}  # as templates have it


def _tool_calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """`tool_calls`, or the `function_call` that was their forerunner, as `tool_calls`."""
    calls, old = message.get("tool_calls"), message.get("function_call")
    path = f"{place}.tool_calls"
    if not calls and old:
        calls, path = [{"function": old}], f"{place}.function_call"
    if not calls:
        return []
    if not isinstance(calls, list):
        raise invalid(path, "must be a list")
    return [_tool_call(call, path) for call in calls]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequestError(f"{path}: each needs a function with a name", param=path)
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidRequestError(f"{path}: a function's arguments must be a string or an object", param=path)
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)  # as OpenAI's clients send them
    called = {"name": function["name"], "arguments": arguments or "{}"}
    result = {"type": "function", "function": called}
    call_id = call.get("id")
    if call_id is None:
        return result
    if not isinstance(call_id, str):
        raise InvalidRequestError(f"{path}: a call's id must be a string", param=path)
    return {"id": call_id} | result


def parse_content(content: Any, place: str) -> str | list[dict[str, str]]:
    """Content of a message: a string, or its parts; the chat template gets the form that it reads.

    Raises:
        InvalidRequestError: it has something else than text; `param` is its place, which begins with `place`.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(place, "must be a string or a list of text parts")
    return [{"type": "text", "text": _part(part, f"{place}[{i}]")} for i, part in enumerate(content)]


_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with a part's text, by the part's type in OpenAI's two APIs."""


def tower_hint(kind: object) -> str:
    """Reason why a part of this type is refused, as the end of a message; "" for other types than images and sound."""
    is_seen = isinstance(kind, str) and any(name in kind for name in ("image", "video", "audio"))
    return "; models are served without their vision and audio towers" if is_seen else ""


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(place, "must be an object with type and text")
    kind = part.get("type")
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if kind is None and isinstance(part.get("text"), str):
        name = "text"
    if name is None:
        raise InvalidRequestError(
            f"{place}: parts of type {shorten(repr(kind))} are not supported, only text{tower_hint(kind)}", param=place
        )
    unknown = sorted(key for key, value in part.items() if key not in ("type", name) and value is not None)
    if unknown:
        where = f"{place}.{shorten(unknown[0])}"
        raise InvalidRequestError(f"Unsupported field: {where!r}", param=where)
    if not isinstance(part.get(name), str):
        raise invalid(f"{place}.{name}", "must be a string")
    return str(part[name])
