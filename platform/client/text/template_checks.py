"""Checks that no text of a message is lost in the chat template.

`conversation` are messages in the one form of `chat_template.py`: content as a list of text parts.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...core.errors import InvalidRequestError

_MAX_COMPARED = 4
"""Calls and results that are compared one by one with a template that refuses marks: each is a rendering."""

Search = Callable[[str, str, int], int | None]
"""Finds a text in the prompt from an index on; returns the index of its end."""
Render = Callable[[list[dict[str, Any]]], str]
"""The chat template with its options, applied to a conversation."""


def check_texts_arrive(conversation: list[dict[str, Any]], rendered: str) -> None:
    """Refuse the conversation when text of users or systems is missing. Assistants' reasoning is left out rightly."""
    rendered = rendered.casefold()
    searches: list[Search] = [
        _find_whole,
        *(partial(_find_words, escape) for escape in (str, _as_json, _as_ascii_json, html.escape)),
    ]
    ends = {"user": 0, "system": 0, "developer": 0}  # the texts of a role stay in their order
    for index, message in enumerate(conversation):
        role = message["role"]
        if role not in ends:
            continue
        text = "\n".join(part["text"] for part in message["content"])
        end = _find_text(text, rendered, ends[role], searches)
        if end is None:
            raise InvalidRequestError(
                f"the chat template leaves text of messages[{index}] ({role}) out of the prompt",
                param=f"messages[{index}].content",
            )
        ends[role] = end


def _find_text(text: str, rendered: str, start: int, searches: list[Search]) -> int | None:
    """Index of the end of `text` in `rendered`, from `start` on; None when it is missing.

    The search that succeeds becomes the first one: a template treats all texts alike, and a search that fails looks at
    all that is left of `rendered`.
    """
    for index, search in enumerate(searches):
        end = search(text, rendered, start)
        if end is not None:
            searches.insert(0, searches.pop(index))
            return end
    return None


def _find_whole(text: str, rendered: str, start: int) -> int | None:
    text = text.strip().casefold()
    place = rendered.find(text, start)
    return None if place < 0 else place + len(text)


def _find_words(escape: Callable[[str], str], text: str, rendered: str, place: int) -> int | None:
    """Find the words of an escaped text, in their order.

    Templates trim texts, and take out switches ("/no_think"), tags and reasoning: none of these is missed.
    """
    for word in escape(text.rpartition("</think>")[2]).casefold().split():
        if word.startswith("/") or ("<" in word and ">" in word):
            continue
        found = rendered.find(word, place)
        if found < 0:
            return None
        place = found + len(word)
    return place


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def check_tools_are_listed(tools: Sequence[Any], text: str, render: Callable[[list[Any]], str]) -> None:
    """Refuse tools, dicts or functions as transformers takes them, that the template leaves out.

    A tool whose name is not in the text may be written otherwise, such as escaped: the text that `render` makes with
    the other tools must then be another one.
    """
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        name = function.get("name") if isinstance(function, dict) else getattr(function, "__name__", None)
        if not isinstance(name, str) or name in text:
            continue
        if not _is_same(text, render, [*tools[:index], *tools[index + 1 :]]):
            return  # and so are the names of the others: to render them all takes too long
        raise InvalidRequestError(
            "the chat template writes no tools into the prompt: give chat_template, or start the server with "
            "--chat-template FILE",
            param=f"tools[{index}]",
        )


def missing_tools(conversation: list[dict[str, Any]], render: Render) -> list[ToolPlace]:
    """Tool calls and results that do not arrive in the prompt as they are, for `check_tools_arrive`: the template is
    rendered with a mark in place of each function's name and each result."""
    places = list(_tool_places(conversation))
    marked = conversation
    for place in places:
        marked = place.replaced(marked, everything=False)
    try:
        arrived = render(marked).casefold() if places else ""
    except Exception:  # the template reads what the marks replaced
        return places[:_MAX_COMPARED]
    return [place for place in places if place.mark not in arrived]


def check_tools_arrive(conversation: list[dict[str, Any]], missing: list[ToolPlace], text: str, render: Render) -> None:
    """Refuse a conversation whose tool calls or results the template leaves out. One of `missing` may be written
    otherwise, such as escaped: the prompt with other text there alone must then be another one."""
    for place in missing:
        if not _is_same(text, render, place.replaced(conversation, everything=True)):
            return  # and so are the others: to render them all takes too long
        raise InvalidRequestError(
            f"{place.param}: the model's chat template leaves tool calls or their results out", param=place.param
        )


class ToolPlace(NamedTuple):
    """A tool call or a result in a conversation."""

    message: int
    call: int | None
    """Index of the call in the message; None: the message is a result."""
    mark: str

    @property
    def param(self) -> str:
        """Name in errors."""
        return f"messages[{self.message}]" + ("" if self.call is None else ".tool_calls")

    def replaced(self, conversation: list[dict[str, Any]], *, everything: bool) -> list[dict[str, Any]]:
        """The conversation with the mark in place of the name, with `everything` of the arguments too, or of the
        result."""
        message = conversation[self.message]
        if self.call is None:
            message = {**message, "content": [{"type": "text", "text": self.mark}]}
        else:
            calls = list(message["tool_calls"])
            function = {**calls[self.call]["function"], "name": self.mark}
            calls[self.call] = {
                **calls[self.call],
                "function": function | ({"arguments": {self.mark: self.mark}} if everything else {}),
            }
            message = {**message, "tool_calls": calls}
        return [*conversation[: self.message], message, *conversation[self.message + 1 :]]


def _tool_places(conversation: list[dict[str, Any]]) -> Iterator[ToolPlace]:
    """Calls and results, in their order."""
    for index, message in enumerate(conversation):
        for call in range(len(message.get("tool_calls") or ())):
            yield ToolPlace(index, call, f"zqtool{index}x{call}zq")
        if message["role"] == "tool" and any(part["text"].strip() for part in message["content"]):
            yield ToolPlace(index, None, f"zqtool{index}zq")


def _is_same(text: str, render: Callable[[list[Any]], str], without: list[Any]) -> bool:
    try:
        return render(without) == text
    except Exception:  # the template misses something, which it therefore reads
        return False
