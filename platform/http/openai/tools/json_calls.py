"""Calls as JSON, whose arguments are passed on while the model writes them."""

from __future__ import annotations

import json
from typing import Any

from .calls import CallDeltas, Delta, as_object, escaped, leading
from .scanner import Kind, Lexeme

_ARGUMENTS = ("arguments", "parameters")
_ENVELOPE = frozenset({"name", "type", "id"})
"""Members of a call's object other than its arguments. An object without arguments that has others is no call."""


class JsonValue:
    """Arguments as they are passed on: control characters are escaped, an object in a string is that object, and null
    and an empty string are an empty object."""

    def __init__(self) -> None:
        self.has_begun = self.is_complete = False
        self._depth = 0
        self._collected: list[str] | None = None  # of a value that is no container

    def take(self, lexeme: Lexeme) -> str:
        """Text that the lexeme adds."""
        kind, text = lexeme.kind, lexeme.text
        if kind is Kind.SPACE and (self._depth == 0 or not self.has_begun):
            return ""
        if not self.has_begun:
            self.has_begun = True
            if kind is not Kind.PUNCTUATION:
                self._collected = []
        if kind is Kind.PUNCTUATION:
            self._depth += (text in "{[") - (text in "}]")
        elif kind is Kind.TEXT:
            text = escaped(text)
        if self._collected is None:
            self.is_complete = self._depth == 0
            return text
        self._collected.append(text)
        self.is_complete = kind is not Kind.TEXT and kind is not Kind.OPEN
        return ""

    def end(self) -> str:
        """Text that was held back."""
        if self._collected is None:
            return ""
        text, self._collected = "".join(self._collected), None
        return as_object(text) if self.is_complete else text


class JsonCalls:
    """Calls as JSON, whose arguments are passed on while they come: {"name": ..., "arguments": {...}}, alone, several
    in a row, or in a list. Any other object is content."""

    def __init__(self, calls: CallDeltas, begin: str = "") -> None:
        """`begin`: the mark before the calls, with white space around it."""
        self.deltas: list[Delta] = []
        self._calls = calls
        self._held = begin  # text that is an envelope or content, depending on what follows
        self._space = leading(begin)
        self._is_marked = not begin or not begin.isspace()
        self._base = self._depth = 0  # containers around the calls, and around the next character
        self._was_call: bool | None = None  # the last value; None: there was none
        self._reset()

    def _reset(self) -> None:
        """Begin an object."""
        self._is_call: bool | None = None  # None: not decided
        self._token = ""  # string directly in the object
        self._key: str | None = None  # whose value comes next
        self._last: Any = None  # value of the last string directly in the object
        self._name: str | None = None
        self._outside = ""  # the object with 0 in place of the arguments
        self._value: JsonValue | None = None  # the arguments
        self._in_value = False
        self._early: list[str] = []  # arguments before the name

    def take(self, lexeme: Lexeme) -> bool:
        """See `CallText`."""
        if self._depth == self._base:
            return self._between(lexeme)
        if self._is_call is False:
            self._content(lexeme.text)
            self._nest(lexeme)
            return True
        if self._is_call is None:
            self._held += lexeme.text
        inside = self._depth - self._base == 1
        if self._in_value and not (inside and lexeme.kind is Kind.PUNCTUATION and lexeme.text in ",}]"):
            self._argument(lexeme)
            self._nest(lexeme)
            return True
        self._end_value()
        self._outside += lexeme.text
        if inside:
            self._member(lexeme)
        self._nest(lexeme)
        return True

    def _between(self, lexeme: Lexeme) -> bool:
        """Take a lexeme between two values."""
        kind, text = lexeme.kind, lexeme.text
        is_next = self._was_call is None or self._is_marked or self._base == 1
        is_comma = kind is Kind.PUNCTUATION and text == ","
        if kind is Kind.SPACE or (is_comma and self._was_call is not None and is_next):
            self._held += text
        elif kind is Kind.PUNCTUATION and text == "{" and is_next:
            self._reset()
            self._held += text
            self._outside = text
            self._depth += 1
        elif kind is Kind.PUNCTUATION and text == "[" and self._base == 0 and is_next:
            self._held += text
            self._base = self._depth = 1
        elif kind is Kind.PUNCTUATION and text == "]" and self._base == 1:
            self._base = self._depth = 0
            self._held += text
            if not self._was_call:
                self._flush()
                self._was_call = False
        elif self._base == 1:  # an item that is no object
            self._flush(text)
            self._is_call = self._was_call = False
            self._depth += kind is Kind.PUNCTUATION and text in "{["
        else:
            return False
        return True

    def _nest(self, lexeme: Lexeme) -> None:
        """Follow the containers, and end the object that is closed."""
        if lexeme.kind is not Kind.PUNCTUATION:
            return
        self._depth += (lexeme.text in "{[") - (lexeme.text in "}]")
        if self._depth > self._base:
            return
        self._end_object()

    def _end_object(self) -> None:
        """Decide whether an object is a call. Text of a call that is neither its name nor its arguments is content."""
        envelope = _envelope(self._outside)
        is_named = self._name is not None and self._value is None and self._is_marked
        if self._is_call is None and is_named and envelope is not None and envelope.keys() <= _ENVELOPE:
            self._confirm()
            self.deltas += self._calls.arguments("{}")
        elif self._is_call is None:
            self._refute()
        elif self._is_call:
            self._calls.end(is_complete=self._value is None or self._value.is_complete)
            self._content(self._outside if envelope is None else _others(envelope))
        self._was_call = bool(self._is_call)

    def _member(self, lexeme: Lexeme) -> None:
        """Take a lexeme directly in the object of a call, outside of its arguments."""
        kind, text = lexeme.kind, lexeme.text
        if kind is Kind.OPEN:
            self._token = text
        elif kind is Kind.TEXT:
            self._token += text
        elif kind is Kind.CLOSE:
            try:
                self._last = json.loads(self._token + text, strict=False)
            except ValueError:
                self._last = None
            if self._key == "name" and self._name is None:
                self._named(self._last)
        elif text == ":" and self._key is None:
            self._key = str(self._last)
            if self._key in _ARGUMENTS and self._value is None:
                self._value, self._in_value = JsonValue(), True
        elif text == ",":
            self._key = self._last = None

    def _named(self, name: Any) -> None:
        if not self._calls.knows(name):
            self._refute()
            return
        self._name = name
        if self._value is not None and self._value.has_begun:
            self._confirm()

    def _argument(self, lexeme: Lexeme) -> None:
        assert self._value is not None
        text = self._value.take(lexeme)
        if self._is_call is None and self._name is not None and self._value.has_begun:
            self._confirm()
        self._pass(text)

    def _pass(self, text: str) -> None:
        if self._is_call:
            self.deltas += self._calls.arguments(text)
        elif text:
            self._early.append(text)

    def _end_value(self) -> None:
        if self._in_value:
            assert self._value is not None
            self._pass(self._value.end())
            self._in_value, self._key = False, None
            self._outside += "0" if self._value.has_begun else ""

    def _confirm(self) -> None:
        """The object is a call: what was held is its envelope."""
        assert self._name is not None
        self._content(self._space)
        self._held, self._space, self._is_call = "", "", True
        self.deltas += self._calls.begin(self._name)
        self.deltas += self._calls.arguments("".join(self._early))

    def _refute(self) -> None:
        """The object is no call: all of it is content."""
        self._in_value = self._is_call = False
        self._flush()

    def _flush(self, more: str = "") -> None:
        self._content(self._held + more)
        self._held = self._space = ""

    def _content(self, text: str) -> None:
        if text:
            self.deltas.append({"content": text})

    def end(self, mark: str | None) -> None:
        """See `CallText`."""
        if self._depth > self._base:
            self._end_value()
            if self._is_call:
                self._outside = self._outside.rstrip(" \n,") + "}"
                self._end_object()
            else:
                self._was_call = False
        if not self._was_call:
            self._flush(mark or "")
        elif not mark:
            self._content(self._held[len(self._held.rstrip()) :])


def _envelope(text: str) -> dict[str, Any] | None:
    """Object of a call without its arguments; None if it is no JSON, or has a member twice."""
    try:
        value = json.loads(text, strict=False, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) < len(members):
        raise ValueError("a member is there twice")
    return value


def _others(envelope: dict[str, Any]) -> str:
    """Other members of a call that have text."""
    has_arguments = False
    others = {}
    for name, value in envelope.items():
        if name in _ARGUMENTS and not has_arguments:
            has_arguments = True
        elif name not in _ENVELOPE and '"' in json.dumps(value):
            others[name] = value
    return json.dumps(others, ensure_ascii=False) if others else ""


class BareCall:
    """Call whose name is known, and whose arguments are the text."""

    def __init__(self, calls: CallDeltas, name: str, begin: str = "") -> None:
        """`begin`: the mark before the arguments, with the name, and with white space around it."""
        self.deltas: list[Delta] = []
        self._calls, self._name, self._begin = calls, name, begin
        self._is_known = calls.knows(name)
        self._held = ""  # white space around the arguments, or null in place of them
        self._is_refused = False
        self._value = JsonValue()

    def take(self, lexeme: Lexeme) -> bool:
        """See `CallText`."""
        kind, text = lexeme.kind, lexeme.text
        if self._value.has_begun and not self._value.is_complete:
            self._pass(lexeme)
            return True
        begins = not self._value.has_begun and not self._held.strip()
        if begins and (kind is Kind.OPEN or (kind is Kind.PUNCTUATION and text in "{[")):
            if self._is_known:
                self.deltas += [{"content": leading(self._begin)}] if leading(self._begin) else []
                self.deltas += self._calls.begin(self._name)
            else:
                self._content(self._begin + self._held)
            self._held = ""
            self._pass(lexeme)
        elif kind is Kind.SPACE or (
            kind is Kind.ATOM and not self._value.has_begun and "null".startswith(self._held.strip() + text)
        ):
            self._held += text
        else:
            self._is_refused = not self._value.has_begun
            return False
        return True

    def _pass(self, lexeme: Lexeme) -> None:
        text = self._value.take(lexeme)
        if self._value.is_complete:
            text += self._value.end()
        if self._is_known:
            self.deltas += self._calls.arguments(text)
        else:
            self._content(lexeme.text)

    def _content(self, text: str) -> None:
        if text:
            self.deltas.append({"content": text})

    def end(self, mark: str | None) -> None:
        """See `CallText`."""
        if self._value.has_begun:
            if self._is_known:
                self.deltas += self._calls.arguments(self._value.end())
                self._calls.end(is_complete=self._value.is_complete)
                self._content("" if mark else self._held)
            else:
                self._content(self._held + (mark or ""))
        elif self._is_known and not self._is_refused and (self._held.strip() == "null" or mark is not None):
            self._content(leading(self._begin))
            self.deltas += [*self._calls.begin(self._name), *self._calls.arguments("{}")]
        else:
            self._content(self._begin + self._held + (mark or ""))
