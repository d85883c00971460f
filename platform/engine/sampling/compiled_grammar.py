"""Compiled constraints, which the sequences that follow them share, and their common vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core.structured_outputs import MAX_LEXER_STATES
from .mask_threads import consume_without_gil

_CALL_SECONDS = 0.05
"""Time allowed for one token or one mask, which usually takes 1 ms. An ambiguous grammar needs longer with each token,
up to minutes; other work of the process makes some calls slow, never most."""
_MAX_COUNTED = 1.0
"""Most seconds by which one call counts."""
_MAX_EXCESS = 2.0
"""Most seconds that a grammar's calls may take beyond what is allowed."""
_BYTES_PER_STATE, _BYTES_PER_SECOND = 1 << 10, 256 << 20
"""Most memory of a lexer's state, and most that a lexer grows by in a second: 340 bytes and 220 MB were measured."""


class Vocabulary(NamedTuple):
    """A model's tokens in the package's form."""

    tokenizer: Any
    """`llguidance.LLTokenizer`, which has the token `end` after the model's."""
    end: int
    """Token that ends an answer: each request specifies which of the model's tokens do."""
    separators: np.ndarray
    """Tokens [N] int64 that may begin the next item of a list of objects."""

    def text(self, token: int) -> bytes:
        """Bytes of a token; those of a special token begin with 0xFF."""
        text: bytes = self.tokenizer.decode_bytes([token])
        return text


class CompiledGrammar:
    """Compiled constraint. The sequences that follow it share its lexer, which grows with what they visit."""

    def __init__(self, make: Callable[[], Any], vocabulary: Vocabulary, num_bytes: int, *, is_lexical: bool) -> None:
        """Compile.

        Args:
            make: Compiles an `llguidance.LLMatcher`; its errors pass through.
            num_bytes: Its memory.
            is_lexical: No rules of a user can make it ambiguous.
        """
        self.vocabulary = vocabulary
        self.is_lexical = is_lexical
        self.lock = threading.Lock()
        """Held by the thread that follows it: another one would wait in the package, and keep Python's lock."""
        self.problem = ""
        """Reason why it is not used any more; "": there is none."""
        self.num_renewals = 0
        """Number of lexers that became full."""
        self._make = make
        self._num_bytes = num_bytes
        self._seconds = 0.0  # of work with this lexer
        self._excess = 0.0  # seconds that its calls took beyond what they may
        self._matcher = make()
        self.can_roll_back = self._try_rollback()

    @property
    def num_bytes(self) -> int:
        """Upper estimate of its memory: its lexer does not report its size."""
        return self._num_bytes + min(int(self._seconds * _BYTES_PER_SECOND), MAX_LEXER_STATES * _BYTES_PER_STATE)

    def start(self) -> Any:
        """A matcher at the start."""
        return self._matcher.deep_copy()

    def renew(self) -> None:
        """Compile again, with an empty lexer."""
        self.num_renewals += 1
        self._matcher, self._seconds = self._make(), 0.0

    def charge(self, seconds: float) -> None:
        """Record the time of a call. If its calls take too long, it is not used any more."""
        self._seconds += seconds
        self._excess = max(0.0, self._excess + min(seconds, _MAX_COUNTED) - _CALL_SECONDS)
        if self._excess > _MAX_EXCESS:
            self.problem = f"the grammar is too ambiguous: a token took {seconds:.2f} s"

    def _try_rollback(self) -> bool:
        """False for grammars with `max_tokens` or `stop`, which count tokens: the package cannot take these back."""
        matcher = self.start()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error() or not allowed.any():
            return True
        consume_without_gil(matcher, int(allowed.argmax()))
        return bool(matcher.rollback(1)) and not matcher.is_error()
