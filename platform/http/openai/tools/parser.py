"""Answers of a model, piece by piece, as deltas of OpenAI's messages.

A response template of transformers says which marks begin and end reasoning and calls. No text is lost: what is neither
reasoning nor a call is content, as it was written. The deltas of a text, joined, do not depend on how it was cut into
pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import regex

from .calls import CallDeltas, CallText, Delta, Functions, WholeCalls, as_json, join_text
from .json_calls import BareCall, JsonCalls
from .scanner import JSON_STRING, Kind, Lexeme, Scanner, StringForm, find
from .values import properties_by_function, tagged_calls, tagged_form, with_types

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field of reasoning in response templates."""
_KEPT = 256
"""Characters that have been read and are kept: patterns of templates look back at white space and brackets."""
_PIECE = 4096
"""Characters that are read at once: each mark is searched in as many."""
_STREAMED = "{content}", {"name": "{name}", "arguments": "{content}"}
"""Transforms of calls whose JSON can be passed on while it comes."""


class AnswerParser(Protocol):
    """Parser of one choice."""

    @property
    def has_calls(self) -> bool:
        """True once the answer calls a tool."""

    @property
    def is_cut(self) -> bool:
        """True when the answer has ended inside a call, whose arguments are therefore no JSON."""

    def feed(self, text: str) -> list[Delta]:
        """Deltas of the next piece."""

    def finish(self) -> list[Delta]:
        """Deltas of what was held back, at the end of the text."""


class PlainText:
    """Parser of an answer without calls and reasoning."""

    has_calls = is_cut = False

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return []


def _joined(deltas: list[Delta]) -> list[Delta]:
    """The deltas, with neighbouring pieces of one text, or of one call's arguments, in one."""
    joined: list[Delta] = []
    for delta in deltas:
        before = joined[-1] if joined else {}
        [(name, value)] = delta.items()
        if name not in before:
            joined.append(delta)
        elif name != "tool_calls":
            joined[-1] = {name: before[name] + value}
        elif "id" in value[0]:
            joined.append(delta)
        else:
            [call], [more] = before[name], value
            function = {**call["function"], "arguments": call["function"]["arguments"] + more["function"]["arguments"]}
            joined[-1] = {name: [{**call, "function": function}]}
    return joined


class _Calls:
    """A region of calls: the scanner of its text, and the reader of what it finds."""

    def __init__(self, scanner: Scanner, reader: CallText, captures: dict[str, str] | None = None) -> None:
        """`captures`: Named groups of the mark that began the region, to which those of its end are added."""
        self._scanner, self._reader, self._captures = scanner, reader, {} if captures is None else captures

    def read(self, text: str, start: int, *, final: bool) -> tuple[int, bool]:
        """Read on in a text. Returns the position to continue from, and True if the region has ended there.

        Args:
            final: True: no more text follows.
        """
        for lexeme in self._scanner.scan(text, start, final=final):
            if lexeme.kind is Kind.END:
                self._captures |= {name: text for name, text in lexeme.match.groupdict().items() if text is not None}
                self._reader.end(lexeme.text)
                return start + len(lexeme.text), True
            if not self._reader.take(lexeme):
                self._reader.end("")
                return start, True
            start += len(lexeme.text)
        if final:
            self._reader.end(None)
        return start, final

    def deltas(self) -> list[Delta]:
        """Deltas since the last call."""
        deltas, self._reader.deltas = self._reader.deltas, []
        return deltas


class ForcedCalls:
    """Parser of an answer that a grammar has made one call, or a list of calls."""

    def __init__(self, name: str | None, names: Collection[str] | None = None, *, parallel: bool = True) -> None:
        """Make a parser.

        Args:
            name: Of the one tool, whose arguments are the answer; None: the answer is a call, or a list of calls.
            names: Of all tools; None: any.
        """
        self._calls = CallDeltas(names, parallel=parallel)
        reader: CallText = JsonCalls(self._calls) if name is None else BareCall(self._calls, name)
        self._region: _Calls | None = _Calls(Scanner(None, (JSON_STRING,)), reader)
        self._text, self._start = "", 0

    @property
    def has_calls(self) -> bool:
        """See `AnswerParser`. A stop string may have ended the answer before its first call."""
        return self._calls.count > 0

    @property
    def is_cut(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.is_cut

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        return self._read(text, final=False)

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return self._read("", final=True)

    def _read(self, text: str, *, final: bool) -> list[Delta]:
        self._text, self._start = self._text[self._start :] + text, 0
        deltas: list[Delta] = []
        if self._region is not None:
            self._start, has_ended = self._region.read(self._text, self._start, final=final)
            deltas = self._region.deltas()
            if has_ended:
                self._region = None
        if self._region is None:  # the rest is no call
            deltas.append({"content": self._text[self._start :]})
            self._start = len(self._text)
        return _joined([delta for delta in deltas if delta.get("content", "x").strip()])


class ReasonedCalls:
    """Parser of reasoning and then calls that a grammar has made."""

    def __init__(self, reasoning: FormatParser, calls: ForcedCalls) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def has_calls(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.has_calls

    @property
    def is_cut(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.is_cut

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        return self._follow(self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return self._follow(self._reasoning.finish()) + self._calls.finish()

    def _follow(self, deltas: list[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.feed(delta["content"]) if "content" in delta else [delta]
        return found


class _Mark(NamedTuple):
    """Mark in a text, of the field that begins or ends there."""

    start: int
    end: int
    opens: bool
    field: Any
    match: Any


class FormatParser:
    """Parser of an answer in a model's own format."""

    def __init__(
        self,
        template: dict[str, Any],
        prefix: str,
        *,
        with_calls: bool,
        tools: Sequence[dict[str, Any]] = (),
        names: Collection[str] | None = None,
        parallel: bool = True,
    ) -> None:
        """Make a parser.

        Args:
            template: Response template.
            prefix: End of the prompt, which may have opened a region.
            with_calls: False: what would be a call is content.
            tools: Functions whose schemas give the types of arguments that the format writes as plain text.
            names: Of the functions that may be called; None: any.
            parallel: False: calls after the first one are left out.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(template)
        self._fields = {name: each for name, each in spec.fields.items() if with_calls or name != "tool_calls"}
        self._implicit = self._fields.get(spec.implicit or "")
        self._notation = _Notation(template["fields"].get("tool_calls") or {}, tools)
        self._calls = CallDeltas(names, parallel=parallel)
        self._text, self._start = "", 0
        self._open: Any = None  # field of the region, other than calls, that a mark has begun
        self._region: _Calls | None = None
        self._empty_at = -1  # index of the last mark without text
        self._strips = False  # white space before the text of reasoning
        self._space: str | None = ""  # white space between a region and content that may follow; None: in content
        self._has_content = False
        if prefix:
            self._text = spec.truncate_past_last_anchor(prefix)
            self._read(final=False)
            self._strips, self._space, self._has_content = False, "", False

    @property
    def has_calls(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.count > 0

    @property
    def is_cut(self) -> bool:
        """See `AnswerParser`."""
        return self._calls.is_cut

    def feed(self, text: str) -> list[Delta]:
        """See `AnswerParser`."""
        deltas: list[Delta] = []
        for at in range(0, len(text), _PIECE):
            read = max(self._start - _KEPT, 0)
            if read > len(self._text) // 2:
                self._text, self._start, self._empty_at = self._text[read:], self._start - read, self._empty_at - read
            self._text += text[at : at + _PIECE]
            deltas += self._read(final=False)
        return _joined(deltas)

    def finish(self) -> list[Delta]:
        """See `AnswerParser`."""
        return _joined(self._read(final=True))

    def _read(self, *, final: bool) -> list[Delta]:
        """Deltas of what is certain in the text so far."""
        deltas: list[Delta] = []
        while True:
            if self._region is not None:
                self._start, has_ended = self._region.read(self._text, self._start, final=final)
                for delta in self._region.deltas():
                    deltas += self._content(delta["content"]) if "content" in delta else [delta]
                if not has_ended:
                    return deltas
                self._region = None
            mark, until = self._next_mark(final=final)
            deltas += self._passed(self._text[self._start : until])
            self._start = until
            if mark is None:
                return deltas
            self._begin(mark)

    def _next_mark(self, *, final: bool) -> tuple[_Mark | None, int]:
        """The next mark, and the index up to which the text has none. Of those that begin at one character it is the
        longest; None if there is none, or if more text decides which it is."""
        watched = [(self._open, False)]
        if self._open is None:
            watched = [(self._implicit, False), *((field, True) for field in self._fields.values())]
        first: _Mark | None = None
        until = len(self._text)
        for field, opens in watched:
            pattern = None if field is None else field.open_re if opens else field.close_re
            start, match = find(pattern, self._text, self._start, final=final)
            mark = None if match is None else _Mark(start, match.end(), opens, field, match)
            if mark is None or (mark.start == mark.end and (start == self._empty_at or not (opens or self._open))):
                until = min(until, start)
            elif first is None or (first.start, -first.end) >= (mark.start, -mark.end):
                first = mark
        if first is None or first.start > until or (first.start == until and not final):
            return None, until
        return first, first.start

    def _begin(self, mark: _Mark) -> None:
        """Begin the region after a mark."""
        if mark.start == mark.end:
            self._empty_at = mark.start
        self._start = mark.end
        self._space = self._space or ""
        self._open = None
        if mark.opens and mark.field.name == "tool_calls":
            self._region = self._notation.region(self._calls, mark.field, mark.match)
        elif mark.opens:
            self._open, self._strips = mark.field, True

    def _passed(self, text: str) -> list[Delta]:
        """Deltas of text in a region other than calls."""
        field = self._open or self._implicit
        if not text or field is None:
            return []
        if field.name not in _REASONING:
            return self._content(text)
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return [{"reasoning_content": text}] if text else []

    def _content(self, text: str) -> list[Delta]:
        """Deltas of content. White space before its first character, and after its last one before a call, is none."""
        if self._space is not None:
            stripped = text.lstrip()
            self._space += text[: len(text) - len(stripped)]
            if not stripped:
                return []
            text = (self._space if self._has_content else "") + stripped
            self._space = None
        self._has_content |= bool(text)
        return [{"content": text}] if text else []


class _Notation:
    """Format of calls in a response template."""

    def __init__(self, field: dict[str, Any], tools: Sequence[dict[str, Any]]) -> None:
        """`field`: of calls, in the template."""
        content, options = field.get("content", "text"), field.get("content_args") or {}
        transform = field.get("transform")
        function = transform.get("function") if isinstance(transform, dict) else None
        self._properties = properties_by_function(tools)
        self._is_json = content == "json"
        self._streams = self._is_json and not options and function in _STREAMED
        self._tags = tagged_form(options.get("tag_pattern", "")) if content == "xml-inline" else None
        self._needs_end = content not in ("json", "python-call-list")
        strings = [
            StringForm(begin[0], regex.compile(regex.escape(begin)), regex.compile(regex.escape(end)))
            for begin, end in options.get("string_delims", ())
        ]
        self._strings = (*strings, JSON_STRING) if self._is_json else (self._tags.value,) if self._tags else ()

    def region(self, calls: CallDeltas, field: Any, match: Any) -> _Calls:
        """The region that a match of the template's mark begins."""
        begin, captures = match.group(), {name: text for name, text in match.groupdict().items() if text is not None}
        name = captures.get("name")
        reader: CallText
        if self._streams:
            reader = JsonCalls(calls, begin) if name is None else BareCall(calls, name, begin)
        else:
            reader = WholeCalls(
                calls,
                begin,
                lambda lexemes: self._functions(lexemes, field, captures),
                names=() if name is None else (name,),
                is_value=self._is_json,
                needs_end=self._needs_end and field.close_re is not None,
            )
        return _Calls(Scanner(field.close_re, self._strings), reader, captures)

    def _functions(self, lexemes: list[Lexeme], field: Any, captures: dict[str, str]) -> Functions:
        """Functions of the calls in a region; none if something in it is no call."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        functions: list[Any]
        if self._tags is not None and "name" in captures:
            functions = tagged_calls(captures["name"], lexemes, self._tags)
        else:
            try:
                value = process_field(as_json(lexemes) if self._is_json else join_text(lexemes), field, captures)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return []
            calls = value if isinstance(value, list) else [value]
            functions = [call.get("function") if isinstance(call, dict) else {} for call in calls]
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
            return []
        return [with_types(function, self._properties.get(function["name"], {})) for function in functions]
