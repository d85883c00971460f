"""Chat messages as the OpenAI API writes them -> what chat templates expect: role and text."""

from __future__ import annotations

from typing import Any

from ..core.errors import InvalidRequestError
from .text import shorten

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Clients send back the assistant's message as they got it; what is null or empty in it says nothing.
_NULL_FIELDS = {"refusal", "audio", "annotations", "function_call", "tool_calls", "reasoning", "reasoning_content"}


def normalize_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Check `messages` and reduce them to role, content and, where given, name.

    Raises:
        InvalidRequestError: `param` names the place, such as "messages[0].content[1]".
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{place} must be an object", param=place)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(_ROLES)}; got {shorten(repr(role))}", param=f"{place}.role"
        )
    for name, value in message.items():
        if name in ("role", "content", "name") or (name in _NULL_FIELDS and value in (None, [], {})):
            continue
        name = shorten(name)
        raise InvalidRequestError(f"Unsupported field: '{place}.{name}'", param=f"{place}.{name}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""  # so says the API of a message that had no text
    result: dict[str, Any] = {"role": _ROLES[role], "content": _content(content, f"{place}.content")}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequestError(f"{place}.name must be a string", param=f"{place}.name")
        result["name"] = name
    return result


def num_chars(message: dict[str, Any]) -> int:
    """Characters in the content of a checked message."""
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _content(content: Any, place: str) -> str | list[dict[str, str]]:
    """A string as it is, parts as parts: the chat template is given the form that it reads."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place} must be a string or a list of text parts", param=place)
    return [{"type": "text", "text": _part(part, f"{place}[{i}]")} for i, part in enumerate(content)]


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{place} must be an object with type and text", param=place)
    kind = part.get("type")
    if kind != "text":
        raise InvalidRequestError(
            f"{place}: parts of type {shorten(repr(kind))} are not supported, only text", param=place
        )
    unknown = sorted(set(part) - {"type", "text"})
    if unknown:
        where = f"{place}.{shorten(unknown[0])}"
        raise InvalidRequestError(f"Unsupported field: {where!r}", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{place}.text must be a string", param=f"{place}.text")
    return str(part["text"])
