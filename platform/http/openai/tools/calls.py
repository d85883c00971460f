"""Calls in the text between the marks of a format, as deltas; text that turns out to be no call is content.

A call has a name, one of the request's functions, and arguments. Its arguments are passed on as the model writes them:
a call that is cut off stays cut off.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import regex

from .scanner import Kind, Lexeme

Delta = dict[str, Any]
"""Fields of a message's delta: `content`, `reasoning_content`, `tool_calls`."""
Functions = list[dict[str, Any]]
"""Name and arguments of each call."""

_CONTROL = regex.compile(r"\\[^\x00-\x1f]|\\?[\x00-\x1f]")
"""An escape, or a control character, which JSON's strings must not have, with a backslash before it."""


class CallDeltas:
    """Deltas of the calls of one choice."""

    def __init__(self, names: Collection[str] | None = None, *, parallel: bool = True) -> None:
        """Begin without calls.

        Args:
            names: Of the functions that may be called; None: any.
            parallel: False: calls after the first one are left out.
        """
        self._names, self._parallel = names, parallel
        self.count = 0
        self.is_cut = False
        """True when the text has ended inside the last call."""

    def knows(self, name: object) -> bool:
        """True for a name that may be called."""
        return isinstance(name, str) and (self._names is None or name in self._names)

    def begin(self, name: str) -> list[Delta]:
        """Begin the next call."""
        self.count += 1
        self.end(is_complete=True)
        call = {"index": self.count - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return self._passed({**call, "function": {"name": name, "arguments": ""}})

    def arguments(self, text: str) -> list[Delta]:
        """More of the last call's arguments."""
        return self._passed({"index": self.count - 1, "function": {"arguments": text}}) if text else []

    def end(self, *, is_complete: bool) -> None:
        """End the last call."""
        if self._parallel or self.count == 1:
            self.is_cut = not is_complete

    def _passed(self, call: dict[str, Any]) -> list[Delta]:
        return [{"tool_calls": [call]}] if self._parallel or self.count == 1 else []


class CallText(Protocol):
    """Reader of the lexemes of one region of calls."""

    deltas: list[Delta]
    """Deltas of what is certain; the caller takes them out. Content is text that is no call, as it was written."""

    def take(self, lexeme: Lexeme) -> bool:
        """Take the next lexeme, or return False: it belongs to the text after the calls."""

    def end(self, mark: str | None) -> None:
        """End the region by its mark, "" for the text after it; None: by the end of the text."""


def escaped(text: str) -> str:
    """Text in a string of JSON, with its control characters escaped."""
    return _CONTROL.sub(_escape, text)


def _escape(found: Any) -> str:
    last = found[0][-1]
    return json.dumps(last)[1:-1] if last < " " else str(found[0])


def as_object(text: str) -> str:
    """Arguments that are no object: the object that they stand for, or as they are."""
    try:
        inner = json.loads(text)
        value = json.loads(inner or "null", strict=False) if isinstance(inner, str) else inner
    except (ValueError, RecursionError):
        return text
    if value is None:
        return "{}"
    if not isinstance(value, dict) or not isinstance(inner, str):
        return text
    return json.dumps(value, ensure_ascii=False) if escaped(inner) != inner else str(inner)


def leading(text: str) -> str:
    """White space before a mark."""
    return text[: len(text) - len(text.lstrip())]


def join_text(lexemes: Iterable[Lexeme]) -> str:
    """Text of lexemes."""
    return "".join(lexeme.text for lexeme in lexemes)


def as_json(lexemes: Iterable[Lexeme]) -> str:
    """Text of lexemes, with the control characters in strings of JSON escaped."""
    texts, quote = [], ""
    for kind, text, _ in lexemes:
        quote = text if kind is Kind.OPEN else quote
        texts.append(escaped(text) if kind is Kind.TEXT and quote == '"' else text)
    return "".join(texts)


class WholeCalls:
    """Calls in a notation that is no JSON: they are passed on when the region has ended."""

    def __init__(
        self,
        calls: CallDeltas,
        begin: str,
        read: Callable[[list[Lexeme]], Functions],
        *,
        names: Collection[str] = (),
        is_value: bool,
        needs_end: bool,
    ) -> None:
        """Begin a region.

        Args:
            begin: The mark before the calls, with white space around it.
            read: Reads the calls; none if the text is not what the format wants.
            names: Of functions in `begin`.
            is_value: The region is one value in brackets.
            needs_end: Without the mark of its end it has no calls.
        """
        self.deltas: list[Delta] = []
        self._calls, self._begin, self._read = calls, begin, read
        self._is_value, self._needs_end = is_value, needs_end
        self._lexemes: list[Lexeme] = []
        self._depth = 0
        self._has_value = False
        self._is_refuted = not all(map(calls.knows, names))
        if self._is_refuted:
            self.deltas.append({"content": begin})

    def take(self, lexeme: Lexeme) -> bool:
        """See `CallText`."""
        if self._is_value and lexeme.kind is not Kind.SPACE:
            opens = lexeme.kind is Kind.PUNCTUATION and lexeme.text in "{["
            if self._depth == 0 and (self._has_value or not opens):
                return False
            if lexeme.kind is Kind.PUNCTUATION:
                self._depth += opens - (lexeme.text in "}]")
            self._has_value = self._depth == 0
        if self._is_refuted:
            self.deltas.append({"content": lexeme.text})
        else:
            self._lexemes.append(lexeme)
        return True

    def end(self, mark: str | None) -> None:
        """See `CallText`."""
        functions: Functions = []
        if not self._is_refuted and not (mark is None and self._needs_end):
            functions = self._read(self._lexemes)
        if functions and all(self._calls.knows(function.get("name")) for function in functions):
            self._content(leading(self._begin))
            for function in functions:
                arguments = function.get("arguments") or {}
                text = json.dumps(arguments, ensure_ascii=False)
                self.deltas += self._calls.begin(function["name"])
                self.deltas += self._calls.arguments(text if isinstance(arguments, dict) else as_object(text))
            body = "" if mark else join_text(self._lexemes)
            self._content(body[len(body.rstrip()) :])
        else:
            begin = "" if self._is_refuted else self._begin
            self._content(begin + join_text(self._lexemes) + (mark or ""))

    def _content(self, text: str) -> None:
        if text:
            self.deltas.append({"content": text})
