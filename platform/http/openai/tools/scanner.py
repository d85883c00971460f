"""Scanner of the text of calls: which of it is inside strings, and where the calls end.

A mark inside a string ends nothing. What a string is depends on the format: JSON's quotes with their escapes, marks
around a text (`<escape>`), or the tags of a parameter. The text comes in pieces of any size, and is scanned once.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import regex


class Kind(Enum):
    """Kind of a lexeme."""

    SPACE = 0
    PUNCTUATION = 1
    """One of `{}[],:`."""
    OPEN = 2
    """Begin of a string: its quote."""
    TEXT = 3
    """Piece of a string. No escape of JSON is cut in two."""
    CLOSE = 4
    """End of a string."""
    ATOM = 5
    """Piece of anything else outside strings, such as a number."""
    END = 6
    """The mark that ends the calls."""


class Lexeme(NamedTuple):
    """Piece of the text of calls."""

    kind: Kind
    text: str
    match: Any = None
    """Match of the pattern, of `OPEN` and `END`."""


class StringForm(NamedTuple):
    """Form of strings in a format."""

    first: str
    """First character of `open`."""
    open: Any
    """Pattern of the text before a string."""
    close: Any
    """Pattern of the text after it; None: that of JSON, in which a backslash escapes the next character."""


JSON_STRING = StringForm('"', regex.compile('"'), None)
_SPACE = regex.compile(r"\s+")
_ESCAPED = regex.compile(r'(?:[^"\\]|\\.)+', regex.DOTALL)
"""Inside of a JSON string; a backslash at the end waits for the character that it escapes."""
_PUNCTUATION = frozenset("{}[],:")
_NO_LITERAL = regex.compile(r"(?<!\\)[|()\[\]*+?.^$]|\\[a-zA-Z]")


def find(pattern: Any, text: str, start: int, *, final: bool) -> tuple[int, Any]:
    """Index of the pattern's first match, and the match. The match is None if more text decides whether it is one, or
    if nothing matches; the index is then that of the text's end.

    Args:
        final: True: no more text follows.
    """
    found = None if pattern is None else pattern.search(text, start, partial=not final)
    if found is None:
        return len(text), None
    return found.start(), found if final or not (found.partial or _can_grow(pattern, text, found)) else None


def _can_grow(pattern: Any, text: str, found: Any) -> bool:
    """True when more text can change a match: all text after it may be its own, or it has looked at the text's end."""
    if _is_literal(pattern):
        return False
    if found.end() == len(text) or pattern.fullmatch(text, found.start(), partial=True) is not None:
        return True
    longer = pattern.match(text + "\x00", found.start())
    return longer is None or longer.span() != found.span()


@lru_cache(maxsize=256)
def _is_literal(pattern: Any) -> bool:
    """True for a pattern of one text."""
    return _NO_LITERAL.search(pattern.pattern) is None


class Scanner:
    """Scanner of the text after the mark that begins calls."""

    def __init__(self, end: Any, strings: tuple[StringForm, ...] = ()) -> None:
        """Make a scanner.

        Args:
            end: Pattern of the mark that ends the calls; None: they end with the text.
            strings: Forms of strings; the first one that matches counts.
        """
        self._end, self._strings = end, strings
        self._string: StringForm | None = None  # that is open
        first = regex.escape("".join(form.first for form in strings))
        self._atom = regex.compile(rf"[^\s{{}}\[\],:{first}]+|.", regex.DOTALL)

    def scan(self, text: str, start: int, *, final: bool) -> Iterator[Lexeme]:
        """Lexemes from `start` on, as far as they are certain. After `Kind.END` none follows.

        Args:
            text: All that has come. It may have grown since the last call, whose lexemes ended at `start`.
            final: True: no more text follows.
        """
        place, (mark, found) = start, find(self._end, text, start, final=final)
        while place < len(text) or self._string is None:
            if self._string is not None:
                lexeme = self._in_string(text, place, final=final)
            else:
                if mark < place:  # it was in a string
                    mark, found = find(self._end, text, place, final=final)
                if mark == place:
                    if found is not None:
                        yield Lexeme(Kind.END, found.group(), found)
                    return
                lexeme = self._outside(text, place, mark, final=final)
            if lexeme is None:
                return
            yield lexeme
            place += len(lexeme.text)

    def _outside(self, text: str, start: int, mark: int, *, final: bool) -> Lexeme | None:
        """Next lexeme outside of strings, up to `mark`; None: more text decides it."""
        for form in self._strings:
            opening = form.open.match(text, start, partial=not final)
            if opening is None:
                continue
            if opening.partial:
                return None
            self._string = form
            return Lexeme(Kind.OPEN, opening.group(), opening)
        if (space := _SPACE.match(text, start, mark)) is not None:
            return Lexeme(Kind.SPACE, space.group())
        if text[start] in _PUNCTUATION:
            return Lexeme(Kind.PUNCTUATION, text[start])
        return Lexeme(Kind.ATOM, self._atom.match(text, start, mark).group())

    def _in_string(self, text: str, start: int, *, final: bool) -> Lexeme | None:
        """Next lexeme of the string that is open; None: more text decides it."""
        assert self._string is not None
        if self._string.close is not None:
            end, found = find(self._string.close, text, start, final=final)
        else:
            inside, found = _ESCAPED.match(text, start), None
            end = start if inside is None else inside.end()
            if end == start and text[start] == '"':
                found = self._string.open.match(text, start)
            elif end == start and final:  # a backslash, the last character
                end = len(text)
        if end > start:
            return Lexeme(Kind.TEXT, text[start:end])
        if found is None:
            return None
        self._string = None
        return Lexeme(Kind.CLOSE, found.group())
