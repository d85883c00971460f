"""Check that nothing of a conversation is lost in the chat template.

One rule: a text stands in the prompt as it is, or a mark in its place does, in a second rendering. Names of functions
and results of tools are short, so only a mark counts for them; a template may write them otherwise, so the prompt must
be another one with other text in that place.

`conversation` are messages in the one form of `chat_template.py`: content as a list of text parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...core.errors import InvalidRequestError

_MAX_COMPARED = 4
"""Places that are compared one by one with a template that refuses marks: each is a rendering."""

Render = Callable[[list[dict[str, Any]], list[Any]], str]
"""The chat template with its options, applied to a conversation and its tools."""


class _Place(NamedTuple):
    """A text of a user or a system, a call, a result, or a tool."""

    kind: str
    """"text", "call", "result" or "tool"."""
    position: int
    """Index of the message, or of the tool."""
    call: int = 0
    """Index of the call in its message."""

    @property
    def mark(self) -> str:
        return f"zq{self.kind}{self.position}x{self.call}zq"

    def error(self, conversation: Sequence[dict[str, Any]]) -> InvalidRequestError:
        """Error of a request whose template leaves this place out."""
        message = f"messages[{self.position}]"
        if self.kind == "tool":
            text = "the chat template writes no tools into the prompt: give chat_template, or start the server with "
            return InvalidRequestError(f"{text}--chat-template FILE", param=f"tools[{self.position}]")
        if self.kind == "text":
            text = (
                f"the chat template leaves text of {message} ({conversation[self.position]['role']}) out of the prompt"
            )
            return InvalidRequestError(text, param=f"{message}.content")
        param = f"{message}.tool_calls" if self.kind == "call" else message
        return InvalidRequestError(
            f"{param}: the model's chat template leaves tool calls or their results out", param=param
        )


def check_arrival(conversation: list[dict[str, Any]], tools: Sequence[Any], text: str, render: Render) -> None:
    """Refuse a conversation that the template does not write whole into the prompt `text`. Assistants' reasoning is
    left out rightly.

    Raises:
        InvalidRequestError: names the message or the tool.
    """
    places = list(_places(conversation, tools, text))
    if not places:
        return
    arrived = ""
    try:
        arrived = render(*_marked(conversation, tools, places)).casefold()
    except Exception:  # the template reads what the marks replaced
        places = places[:_MAX_COMPARED]
    for place in places:
        if place.mark in arrived:
            continue
        if (place.kind != "text" or not arrived) and not _is_same(text, render, _marked(conversation, tools, [place])):
            return  # and so are the others: to render them all takes too long
        raise place.error(conversation)


def _places(conversation: Sequence[dict[str, Any]], tools: Sequence[Any], text: str) -> Iterator[_Place]:
    """Places that are not found in the prompt as they are: texts of a role in their order, and names of tools."""
    ends = {"user": 0, "system": 0, "developer": 0}
    for index, message in enumerate(conversation):
        role, content = message["role"], "\n".join(part["text"] for part in message["content"]).strip()
        if role in ends:
            is_altered = ends[role] < 0  # a template treats all texts alike: after one that is altered none is searched
            found = -1 if is_altered else text.find(content, ends[role])
            ends[role] = -1 if found < 0 else found + len(content)
            if found < 0:
                yield _Place("text", index)
        elif role == "tool" and content:
            yield _Place("result", index)
        yield from (_Place("call", index, call) for call in range(len(message.get("tool_calls") or ())))
    for index, tool in enumerate(tools):
        function = _function_of(tool)
        if function is not None and str(function.get("name")) not in text:
            yield _Place("tool", index)


def _function_of(tool: Any) -> dict[str, Any] | None:
    """The description of a tool; None for a function of Python's, which transformers describes."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else None


def _marked(
    conversation: Sequence[dict[str, Any]], tools: Sequence[Any], places: Sequence[_Place]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The conversation and its tools with the marks of these places."""
    messages, tools = list(conversation), list(tools)
    for place in places:
        mark = place.mark
        if place.kind == "tool":
            function = {**(_function_of(tools[place.position]) or {}), "name": mark, "description": mark}
            tools[place.position] = {"type": "function", "function": function}
        elif place.kind == "call":
            calls = list(messages[place.position]["tool_calls"])
            calls[place.call] = {**calls[place.call], "function": {"name": mark, "arguments": {mark: mark}}}
            messages[place.position] = {**messages[place.position], "tool_calls": calls}
        else:
            messages[place.position] = {**messages[place.position], "content": [{"type": "text", "text": mark}]}
    return messages, tools


def _is_same(text: str, render: Render, marked: tuple[list[dict[str, Any]], list[Any]]) -> bool:
    try:
        return render(*marked) == text
    except Exception:  # the template misses something, which it therefore reads
        return False
