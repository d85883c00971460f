"""Answers as content blocks: text, thinking and tool_use, whole or as events of a stream.

Events come from the deltas of the chat's parser. A whole answer is folded from the same events, so that both have the
same blocks. The events of a text, with the deltas of each block joined, do not depend on how it was cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ..openai.tools.calls import Delta
from ..openai.tools.parser import AnswerParser

Event = dict[str, Any]

SIGNATURE = "unsigned"
"""Signature of thinking blocks. It is not checked, but clients leave blocks without one out of the next request."""

_TEXTS = {
    "content": ("text", "text_delta"),
    "reasoning_content": ("thinking", "thinking_delta"),
}
"""Block and delta of a chat's texts. The name of a block is that of its text, too."""


class BlockEvents:
    """Writer of the events of one answer's blocks."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._index = -1
        self._kind = ""  # of the block that is open; "" for none

    @property
    def has_calls(self) -> bool:
        """True once the answer calls a tool, unless it has ended inside a call."""
        return self._parser.has_calls and not self._parser.is_cut

    def feed(self, text: str) -> list[Event]:
        """Events of the next piece of the text."""
        return self._events(self._parser.feed(text)) if text else []

    def finish(self) -> list[Event]:
        """Events of what was held back, and of the end of the last block."""
        return [*self._events(self._parser.finish()), *self._close()]

    def _events(self, deltas: list[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            for name, value in delta.items():
                if name == "tool_calls":
                    events += self._call(value[0])
                elif value:
                    events += self._text(*_TEXTS[name], value)
        return events

    def _text(self, kind: str, delta: str, text: str) -> list[Event]:
        empty = {kind: "", "signature": ""} if kind == "thinking" else {kind: ""}
        begin = [] if self._kind == kind else self._open({"type": kind} | empty)
        return [*begin, self._delta({"type": delta, kind: text})]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        function = call["function"]
        begin: list[Event] = []
        if "id" in call:
            begin = self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        if not function["arguments"]:
            return begin
        return [*begin, self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})]

    def _open(self, block: dict[str, Any]) -> list[Event]:
        before = self._close()
        self._index += 1
        self._kind = block["type"]
        return [*before, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._kind:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] if self._kind == "thinking" else []
        self._kind = ""
        return [*signed, {"type": "content_block_stop", "index": self._index}]


def whole_content(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Blocks of a whole answer. The input of a `tool_use` block is an object, which a call that was cut off does not
    have: its text is a text block."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[-1], event["delta"]
            name = next(name for name in delta if name != "type")
            block[name] = block.get(name, "") + delta[name]
    return [_whole_call(block) if block["type"] == "tool_use" else block for block in blocks]


def _whole_call(block: dict[str, Any]) -> dict[str, Any]:
    text = block.pop("partial_json", "")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return block | {"input": value}
    return {"type": "text", "text": f'{{"name": {json.dumps(block["name"])}, "arguments": {text}'}
