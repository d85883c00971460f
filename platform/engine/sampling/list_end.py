"""End of a list of calls before its tokens are used up: a list that is cut off inside a call is useless.

A model may continue with unwanted calls. It may begin another one if the remaining tokens can hold one as long as the
longest so far, and a quarter more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

_BEGIN = b'[{"name"'
"""Start of a list of calls; reasoning may precede it."""
_BEGIN_DEPTH = 2
"""Brackets that are open after it."""
_AFTER_LIST = 2
"""Tokens that follow the last item: "]", and the one that ends the answer."""
ITEM_END = b"},"
"""Text of a token that ends an item and begins the next one."""


@dataclass(slots=True)
class ListProgress:
    """Progress of an answer through its list, token by token."""

    longest: int = 0
    """Tokens of the longest item so far; 0: none has ended."""
    last: bytes = b""
    """End of the text so far."""
    _depth: int = 0  # 0: the list has not begun
    _length: int = 0  # tokens of the item
    _in_string: bool = False
    _is_escaped: bool = False

    def feed(self, token: bytes) -> bool:
        """Consume the text of a token; True if another item begins in it."""
        self._length += 1
        text, begun = token, self._depth > 0
        self.last = (self.last + token)[-len(_BEGIN) - len(token) :]
        if not begun:
            index = self.last.find(_BEGIN)
            if index < 0:
                return False
            text = self.last[index + len(_BEGIN) :]
            self._depth, self._length = _BEGIN_DEPTH, 1
        begins_next = False
        for byte in text:
            begins_next |= self._take(byte)
        return begins_next

    def _take(self, byte: int) -> bool:
        if self._in_string:
            self._in_string = self._is_escaped or byte != 0x22
            self._is_escaped = byte == 0x5C and not self._is_escaped
        elif byte == 0x22:
            self._in_string = True
        elif byte in b"[{":
            self._depth += 1
        elif byte in b"]}":
            self._depth -= 1
            if self._depth == 1 and byte == 0x7D:
                self.longest, self._length = max(self.longest, self._length), 0
        return byte == 0x2C and self._depth == 1 and not self._in_string

    def excess(self, choices: Iterable[tuple[int, bytes]], num_left: int) -> list[int]:
        """Tokens, of the next ones given with their texts, that begin another item for which there are too few left.

        Args:
            num_left: Number of tokens that may still come.
        """
        found = []
        for token, text in choices:
            if ITEM_END in text or (text[:1] == b"," and self.last[-1:] == b"}"):
                after = copy.copy(self)
                needed = (ITEM_END in text) + _AFTER_LIST
                if after.feed(text) and num_left < after.longest + after.longest // 4 + needed:
                    found.append(token)
        return found
