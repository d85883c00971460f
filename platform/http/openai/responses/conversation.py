"""Items of a conversation: as clients write them -> as they are stored and listed -> messages of a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ....core.errors import InvalidRequestError, NotFoundError, invalid
from ....core.text import shorten
from ..chat_messages import check_role, parse_content

Item = dict[str, Any]
"""Item in the form in which OpenAI's API lists it: with `id`, `type` and `status`, and texts in parts."""

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_REFERENCE = "item_reference"
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}
_CALLS = ("function_call", "custom_tool_call")
"""Types of calls; the type of their outputs has the suffix "_output"."""


def new_item_id(kind: str) -> str:
    """Id of an item of this type."""
    return f"{_PREFIXES[kind]}{uuid.uuid4().hex}"


def parse_items(
    value: str | list[Any], before: Sequence[Item] = (), stored: Callable[[], Mapping[str, Item]] = dict
) -> list[Item]:
    """The items of a request's `input`, checked.

    Args:
        before: items of the previous response, whose calls may have their outputs here.
        stored: makes the items, by id, to which there may be references.

    Raises:
        InvalidRequestError: an item is wrong; `param` is its place, such as "input[0].content[1]".
        NotFoundError: a reference to an item that is not stored.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise invalid("input", "must not be empty")
    calls = {(item["type"], item["call_id"]) for item in before if item["type"] in _CALLS}
    seen = {item["id"] for item in before}
    items: list[Item] = []
    known: Mapping[str, Item] | None = None
    for index, given in enumerate(value):
        if isinstance(given, dict) and (given.get("type") == _REFERENCE or given.keys() == {"id"}):
            known = stored() if known is None else known
            item = _referenced(given.get("id"), known, seen, f"input[{index}].id")
        else:
            item = _item(given, f"input[{index}]")
        seen.add(item["id"])
        call = item["type"].removesuffix("_output")
        if item["type"] in _CALLS:
            calls.add((call, item["call_id"]))
        elif call in _CALLS and (call, item["call_id"]) not in calls:
            raise InvalidRequestError(
                f"input[{index}]: there is no {call} with the call_id {shorten(repr(item['call_id']))} before "
                "it, in the input or in the previous response",
                param=f"input[{index}].call_id",
            )
        items.append(item)
    return items


def _referenced(item_id: Any, stored: Mapping[str, Item], seen: Collection[str], place: str) -> Item:
    """The item of a reference. None is there twice: many references to one would be a long conversation."""
    if not isinstance(item_id, str):
        raise invalid(place, "must be a string")
    if item_id in seen:
        raise InvalidRequestError(f"{place}: the item {shorten(repr(item_id))} is a duplicate", param=place)
    if item_id not in stored:
        raise NotFoundError(f"{place}: there is no item {shorten(repr(item_id))} in a stored response", param=place)
    return stored[item_id]


def _item(given: Any, place: str) -> Item:
    if not isinstance(given, dict):
        raise invalid(place, "must be an object")
    kind = given.get("type") or ("message" if "role" in given else None)
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise InvalidRequestError(
            f"{place}: items of type {shorten(repr(kind))} are not supported, only {', '.join((*_MAKERS, _REFERENCE))}",
            param=f"{place}.type",
        )
    item_id = given.get("id")
    if not isinstance(item_id, str | None):
        raise invalid(f"{place}.id", "must be a string")
    status = "incomplete" if is_cut(given) else "completed"
    return {"id": item_id or new_item_id(str(kind)), "type": kind, "status": status, **make(given, place)}


def is_cut(item: Item) -> bool:
    """True for an item whose answer reached `max_output_tokens` before the item's end."""
    return item.get("status") == "incomplete"


def _message(given: dict[str, Any], place: str) -> Item:
    role = check_role(given, place, _ROLES)
    kind = "output_text" if role == "assistant" else "input_text"
    extra: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
    texts = _texts(given.get("content"), f"{place}.content")
    return {"role": role, "content": [{"type": kind, "text": text, **extra} for text in texts]}


def _texts(content: Any, place: str) -> list[str]:
    """Texts of a content, which is a string or a list of parts."""
    parts = parse_content(content, place)
    return [parts] if isinstance(parts, str) else [part["text"] for part in parts]


def _function_call(given: dict[str, Any], place: str) -> Item:
    arguments = given.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    call = {"call_id": given.get("call_id"), "name": given.get("name"), "arguments": arguments}
    for name, value in call.items():
        if not isinstance(value, str) or not (value or name == "arguments"):
            raise invalid(f"{place}.{name}", "must be a string, and not empty")
    return call


def _custom_call(given: dict[str, Any], place: str) -> Item:
    """Call of a tool whose input is a text of any form, such as a patch."""
    call = {name: given.get(name) for name in ("call_id", "name", "input")}
    for name, value in call.items():
        if not isinstance(value, str) or not (value or name == "input"):
            raise invalid(f"{place}.{name}", "must be a string, and not empty")
    return call


def _call_output(given: dict[str, Any], place: str) -> Item:
    call_id, output = given.get("call_id"), given.get("output")
    if not isinstance(call_id, str):
        raise invalid(f"{place}.call_id", "must be a string")
    return {"call_id": call_id, "output": "".join(_texts(output, f"{place}.output"))}


def _reasoning(given: dict[str, Any], place: str) -> Item:
    texts: dict[str, list[str]] = {}
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = given.get(name) or []
        if not isinstance(parts, list):
            raise invalid(f"{place}.{name}", "must be a list")
        for index, part in enumerate(parts):
            where = f"{place}.{name}[{index}]"
            if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
                raise invalid(where, f"must be {{'type': '{kind}', 'text': ...}}")
        texts[name] = [part["text"] for part in parts]
    return {
        "summary": [{"type": "summary_text", "text": text} for text in texts["summary"]],
        "content": [{"type": "reasoning_text", "text": text} for text in texts["content"]],
    }


_MAKERS: dict[str, Callable[[dict[str, Any], str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning,
}


def to_messages(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Messages of a conversation, as chat templates read them. An assistant's text and the calls after it are one
    message, and reasoning belongs to the message that follows it. A call that was cut, without an output, is left out:
    it never was one. The input of a custom tool's call is an argument called "input"."""
    items = list(items)
    answered = {item["call_id"] for item in items if item["type"].endswith("_output")}
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning: list[str] = []  # texts that the next message of the assistant has

    def assistant(content: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
            reasoning.clear()
        messages.append(message)
        return message

    for item in items:
        if item["type"] == "reasoning":
            reasoning += [part["text"] for part in item["content"] or item["summary"]]
        elif item["type"] in _CALLS and is_cut(item) and item["call_id"] not in answered:
            continue
        elif item["type"] in _CALLS:
            is_custom = item["type"] == "custom_tool_call"
            arguments = json.dumps({"input": item["input"]}, ensure_ascii=False) if is_custom else item["arguments"]
            function = {"name": item["name"], "arguments": arguments or "{}"}
            is_next = messages and messages[-1]["role"] == "assistant" and not reasoning
            message = messages[-1] if is_next else assistant("")
            message.setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
        elif item["type"].endswith("_output"):
            messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
        elif item["role"] == "assistant":
            assistant(_template_content(item["content"]))
        else:
            messages.append({"role": _ROLES[item["role"]], "content": _template_content(item["content"])})
    return messages


def _template_content(parts: list[dict[str, Any]]) -> str | list[dict[str, str]]:
    texts = [{"type": "text", "text": part["text"]} for part in parts]
    return texts[0]["text"] if len(texts) == 1 else texts
