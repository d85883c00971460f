"""Answers of a model, piece by piece, as deltas of OpenAI's messages.

transformers' `ResponseParser` finds the regions of a text: content, reasoning, calls. Where a call is JSON, its
arguments are passed on while they come, as the model writes them. The deltas of a text, joined, do not depend on how it
was cut into pieces.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

Delta = dict[str, Any]
"""Fields of a message's delta: `content`, `reasoning_content`, `tool_calls`."""


class AnswerParser(Protocol):
    """Parser of one choice."""

    @property
    def has_calls(self) -> bool:
        """True once the answer calls a tool."""

    def feed(self, text: str) -> list[Delta]:
        """Deltas of the next piece."""

    def finish(self) -> list[Delta]:
        """Deltas of what was held back, at the end of the text."""


class PlainText:
    """Parser of an answer without calls and reasoning."""

    has_calls = False

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return []


class CallDeltas:
    """Deltas of the calls of one choice."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, name: str) -> Delta:
        """Begin the next call."""
        self.count += 1
        call = {"index": self.count - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}

    def arguments(self, text: str) -> list[Delta]:
        """More of the last call's arguments."""
        return [{"tool_calls": [{"index": self.count - 1, "function": {"arguments": text}}]}] if text else []

    def whole(self, function: Any) -> list[Delta]:
        """A call with all of its arguments."""
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [self.begin(function["name"]), *self.arguments(text)]


class JsonCalls:
    """Scanner of JSON text with calls: {"name": ..., "arguments": {...}}, alone or in a list.

    With `name` the text is the arguments alone.
    """

    def __init__(self, calls: CallDeltas, name: str | None = None) -> None:
        self._calls = calls
        self._depth = 0  # of containers around the next character; a list around calls does not count
        self._in_string = self._escaped = False
        self._token = ""  # string at the depth of a call, or other value of it
        self._key: str | None = None  # whose value comes next
        self._name: str | None = None
        self._held = ""  # arguments before the name
        self._passed: list[str] = []  # characters of arguments since the last delta
        self._quoted: list[str] | None = None  # characters of arguments that are a string
        self._begun = False
        self._in_arguments = self._has_arguments = self._is_first = False
        self._bare = name is not None
        self._deltas: list[Delta] = [] if name is None else [calls.begin(name)]

    def feed(self, text: str) -> list[Delta]:
        """Deltas of the next piece."""
        for character in text:
            self._take(character)
        self._flush()
        deltas, self._deltas = self._deltas, []
        return _joined(deltas)

    def finish(self) -> list[Delta]:
        """Deltas of what the end of the text leaves open: arguments in a string, of a call that is not closed."""
        self._unquote()
        return self.feed("")

    def _take(self, character: str) -> None:
        if self._bare:
            if self._depth or not character.isspace():
                self._argument(character)
            self._track(character)
            return
        before = self._depth
        was_string = self._in_string
        if self._in_arguments:
            if before == 1 and not was_string and character in ",}":
                self._in_arguments, self._key = False, None
                self._unquote()
            else:
                self._argument(character)
        self._track(character)
        if self._in_arguments:
            return
        if before == 1 and (was_string or self._in_string):
            self._token += character
            if was_string and not self._in_string:
                self._string(self._token)
                self._token = ""
        elif before == 1 and character == ":" and self._key in ("arguments", "parameters"):
            self._in_arguments = self._has_arguments = self._is_first = True
        elif before == 1 and character == ",":
            self._key = None
        elif before == 1 and self._depth == 0:
            if self._begun and not self._has_arguments:
                self._deltas += self._calls.arguments("{}")
            self._key, self._name, self._held, self._begun, self._has_arguments = None, None, "", False, False

    def _string(self, token: str) -> None:
        """A key, or a value, of a call."""
        try:
            value = json.loads(token)
        except ValueError:
            return
        if self._key is None:
            self._key = value
        elif self._key == "name":
            self._name = value
            self._flush()
            self._deltas.append(self._calls.begin(value))
            self._deltas += self._calls.arguments(self._held)
            self._begun, self._held = True, ""

    def _argument(self, character: str) -> None:
        if character.isspace() and not self._in_string and self._depth <= (0 if self._bare else 1):
            return
        if character == '"' and self._is_first and not self._bare:
            self._quoted = []
        self._is_first = False
        if self._quoted is not None:
            self._quoted.append(character)
        else:
            self._pass(character)

    def _pass(self, text: str) -> None:
        if self._bare or self._begun:
            self._passed.append(text)
        else:
            self._held += text

    def _unquote(self) -> None:
        """Pass arguments that a model has written as a string: the text in it, where that is an object."""
        if self._quoted is None:
            return
        text, self._quoted = "".join(self._quoted), None
        try:
            inner = json.loads(text)
            text = inner if isinstance(json.loads(inner), dict) else text
        except (ValueError, TypeError, RecursionError):
            pass
        self._pass(text)

    def _flush(self) -> None:
        """Make a delta of the arguments that are passed on."""
        self._deltas += self._calls.arguments("".join(self._passed))
        self._passed.clear()

    def _track(self, character: str) -> None:
        """Follow strings and containers."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += not (character == "[" and self._depth == 0 and not self._bare)
        elif character in "}]":
            self._depth -= self._depth > 0


def _joined(deltas: list[Delta]) -> list[Delta]:
    """The deltas, with neighbouring pieces of one call's arguments in one."""
    joined: list[Delta] = []
    for delta in deltas:
        before = joined[-1]["tool_calls"][0] if joined else None
        call = delta["tool_calls"][0]
        if before is not None and "id" not in call and before["index"] == call["index"]:
            before["function"]["arguments"] += call["function"]["arguments"]
        else:
            joined.append(delta)
    return joined


class ForcedCalls:
    """Parser of an answer that a grammar has made one call, or a list of calls."""

    def __init__(self, name: str | None) -> None:
        """`name`: of the one tool, whose arguments are the answer; None: the answer is a list of calls."""
        self._name, self._calls = name, CallDeltas()
        self._scanner: JsonCalls | None = None  # of an answer that has begun

    @property
    def has_calls(self) -> bool:
        """See `AnswerParser`. A stop string may have ended the answer before its first call."""
        return self._calls.count > 0

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        if self._scanner is None and text.strip():
            self._scanner = JsonCalls(self._calls, self._name)
        return [] if self._scanner is None else self._scanner.feed(text)

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return []


class ReasonedCalls:
    """Parser of reasoning and then calls that a grammar has made."""

    def __init__(self, reasoning: FormatParser, calls: ForcedCalls) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def has_calls(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.has_calls

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        return self._follow(self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return self._follow(self._reasoning.finish())

    def _follow(self, deltas: list[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.feed(delta["content"]) if "content" in delta else [delta]
        return found


def _regions(template: dict[str, Any], prefix: str, tools: Sequence[dict[str, Any]]) -> Any:
    """transformers' parser, whose events of a region's begin have the name and the text that stand there. Those of its
    end have the value None where its text is not what the format wants."""
    from transformers.utils.chat_parsing import ResponseParser

    class Regions(ResponseParser):
        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            super()._open_explicit(events, field, m)
            events[-1] |= {"name": m.groupdict().get("name"), "begin": m.group()}

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            field = self._current
            try:
                super()._close_current(events)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                events.append({"type": "region_close", "field": field, "value": None})
                self._reset_to_implicit()

        def end(self) -> list[dict[str, Any]]:
            """Events of the end of the text. `finalize` makes a message too, and refuses one that lacks fields."""
            events: list[dict[str, Any]] = []
            self._process(events, eos=True)
            return events

    return Regions(template, prefix=prefix, tools=list(tools))


def _functions(value: Any) -> list[dict[str, Any]]:
    """Functions of the calls in a region's value; none where something in it is no call."""
    calls = value if isinstance(value, list) else [value]
    found = [call.get("function") if isinstance(call, dict) else None for call in calls]
    functions = [one for one in found if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return functions if len(functions) == len(calls) else []


class _Region(NamedTuple):
    name: str
    calls: JsonCalls | None
    """Scanner of a region of calls whose arguments are passed on while they come."""
    num_calls: int = 0
    """Calls before it."""


class FormatParser:
    """Parser of an answer in a model's own format."""

    def __init__(
        self, template: dict[str, Any], prefix: str, *, with_calls: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Make a parser.

        Args:
            template: Response template.
            prefix: End of the prompt, which may have opened a region.
            with_calls: False: what would be a call is content.
            tools: Functions whose schemas give the types of arguments that the format writes as plain text.
        """
        template = copy.deepcopy(template)
        if not with_calls:
            template["fields"].pop("tool_calls", None)
        self._streams = self._stream_arguments(template)
        self._parser: Any = _regions(template, prefix, () if self._streams else tools)
        self._calls = CallDeltas()
        self._region: _Region | None = None
        self._raw = ""  # text of the region of calls, for the case that it is none
        self._has_raw = False  # a region of calls had none, and is content
        self._strips = False  # white space before the content's first character
        if self._parser._current == "reasoning_content" and self._parser._opened:
            self._region = _Region("reasoning_content", None)

    @staticmethod
    def _stream_arguments(template: dict[str, Any]) -> bool:
        """Let the parser pass the JSON of calls on as text; False where a format writes calls in another way."""
        field = template["fields"].get("tool_calls")
        if field is None or field.get("content") != "json" or field.get("content_args"):
            return False
        forms = "{content}", {"name": "{name}", "arguments": "{content}"}
        if field.get("transform", {}).get("function") not in forms:
            return False
        field |= {"content": "text", "transform": {"text": "{content}"}}
        return True

    @property
    def has_calls(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.count > 0

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        return [delta for event in self._parser.feed(text) for delta in self._event(event)]

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return [delta for event in self._parser.end() for delta in self._event(event)]

    def _event(self, event: dict[str, Any]) -> list[Delta]:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            return self._open(field, event.get("name"), event.get("begin", ""))
        if kind == "region_chunk":
            if field != "tool_calls":
                return self._text(field, event["text"])
            self._raw += event["text"]
            scanner = self._region.calls if self._region is not None else None
            return scanner.feed(event["text"]) if scanner is not None else []
        return self._close(field, event["value"])

    def _open(self, field: str, name: str | None, begin: str) -> list[Delta]:
        scanner, before = None, self._calls.count
        self._raw = begin if name is not None else ""
        if field == "tool_calls" and self._streams:
            scanner = JsonCalls(self._calls, name)
        self._region = _Region(field, scanner, before)
        self._strips = field != "tool_calls" and not self._has_raw
        return scanner.feed("") if scanner is not None else []

    def _close(self, field: str, value: Any) -> list[Delta]:
        region, self._region = self._region, None
        if field != "tool_calls":
            return []
        if region is not None and region.calls is not None:
            if self._calls.count > region.num_calls:
                return region.calls.finish()
        elif functions := _functions(value):
            return [delta for function in functions for delta in self._calls.whole(function)]
        self._has_raw = True  # a call that is none: its text is content
        return [{"content": self._raw}] if self._raw else []

    def _text(self, field: str, text: str) -> list[Delta]:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return [{field: text}] if text else []
