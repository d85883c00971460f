"""Output items of an answer, out of the chat's deltas, with the events of a stream.

A whole answer goes the same way, so that both are one, however the text was cut into pieces.

    response.output_item.added
      message, reasoning:  content_part.added, output_text.delta or reasoning_text.delta ..., .done, content_part.done
      function_call:       function_call_arguments.delta ..., .done
    response.output_item.done
"""

from __future__ import annotations

import copy
from typing import Any

from ..tools.calls import Delta
from ..tools.parser import AnswerParser
from .conversation import Item, new_item_id

StreamEvent = dict[str, Any]
"""Event of a stream, without its number: `type`, and the fields of that type."""
_PARTS = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
"""The first part of a content when the item starts, by the item's type."""


class OutputItems:
    """Items of one answer, the last of which may be open."""

    def __init__(self, parser: AnswerParser) -> None:
        """Begin without items."""
        self.items: list[Item] = []
        self._parser = parser
        self._texts: list[str] | None = None  # pieces of the open item's text or arguments

    @property
    def reasoning(self) -> str:
        """The whole text of the reasoning."""
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def feed(self, text: str) -> list[StreamEvent]:
        """Events of the next piece."""
        return self._take(self._parser.feed(text)) if text else []

    def finish(self, status: str) -> list[StreamEvent]:
        """Events of what was held back at the end of the text, and of the end of the last item, with its status. That
        of a call says whether its arguments are complete. An answer of no text at all has one empty message."""
        events = self._take(self._parser.finish())
        if not self.items:
            events += self._open("message")
        elif self.items[-1]["type"] == "function_call":
            status = self._call_status()
        return events + self.close(status)

    def _call_status(self) -> str:
        """Status of the item that has ended, if it is a call."""
        is_cut = self._parser.is_cut and bool(self.items) and self.items[-1]["type"] == "function_call"
        return "incomplete" if is_cut else "completed"

    def _take(self, deltas: list[Delta]) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        for delta in deltas:
            for name, value in delta.items():
                if name == "tool_calls":
                    events += self._call(value[0])
                else:
                    events += self._text("reasoning" if name == "reasoning_content" else "message", value)
        return events

    def _text(self, kind: str, text: str) -> list[StreamEvent]:
        events = []
        if not self._is_open(kind):
            text = text.lstrip() if self.items else text  # white space between two items belongs to none
            if not text:
                return []
            events = self._open(kind)
        return [*events, self._delta("output_text" if kind == "message" else "reasoning_text", text)]

    def _call(self, call: dict[str, Any]) -> list[StreamEvent]:
        events, function = [], call["function"]
        if "id" in call:
            events = self._open("function_call", call_id=call["id"], name=function["name"], arguments="")
        text = function["arguments"]
        return [*events, self._delta("function_call_arguments", text)] if text else events

    def _is_open(self, kind: str) -> bool:
        return self._texts is not None and self.items[-1]["type"] == kind

    def _open(self, kind: str, **fields: Any) -> list[StreamEvent]:
        """Begin an item, and end the one before it."""
        events = self.close(self._call_status())
        item: Item = {"id": new_item_id(kind), "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._texts = []
        events.append({"type": "response.output_item.added", **self._index(), "item": copy.deepcopy(item)})
        if kind in _PARTS:
            item["content"] = [copy.deepcopy(_PARTS[kind])]
            events.append(self._event("content_part.added", part=copy.deepcopy(_PARTS[kind])))
        return events

    def close(self, status: str) -> list[StreamEvent]:
        """End the open item, if there is one."""
        if self._texts is None:
            return []
        item, text = self.items[-1], "".join(self._texts)
        self._texts = None
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", arguments=text)]
        else:
            [part] = item["content"]
            part["text"] = text
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            events = [
                self._event(f"{kind}.done", text=text, **extra),
                self._event("content_part.done", part=copy.deepcopy(part)),
            ]
        return [*events, {"type": "response.output_item.done", **self._index(), "item": copy.deepcopy(item)}]

    def _delta(self, kind: str, text: str) -> StreamEvent:
        assert self._texts is not None
        self._texts.append(text)
        extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"{kind}.delta", delta=text, **extra)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        """An event inside of the last item."""
        place: dict[str, Any] = {"item_id": self.items[-1]["id"], **self._index()}
        if self.items[-1]["type"] != "function_call":
            place["content_index"] = 0
        return {"type": f"response.{kind}", **place, **fields}

    def _index(self) -> dict[str, int]:
        return {"output_index": len(self.items) - 1}
