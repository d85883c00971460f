"""Detection of texts that repeat themselves, one token at a time, so that drafts do not change where a text ends."""

from __future__ import annotations

import numpy as np

from ...core.repetition import RepetitionDetectionParams


class Repetition:
    """The end of one sequence's output. For each size of a pattern it keeps the number of last tokens that equal the
    token a pattern before them: `count` repetitions are `size * (count - 1)` such tokens."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._least, self._most = max(1, params.min_pattern_size), params.max_pattern_size
        sizes = np.arange(self._least, self._most + 1, dtype=np.int64)
        self._needed = sizes * (params.min_count - 1)
        self._runs = np.zeros_like(sizes)
        self._tokens = np.full(2 * self._most, -1, np.int64)  # the last ones end before `_end`; -1: none
        self._end = self._most

    def add(self, token: int) -> bool:
        """Add the next token; returns True if it completes a repetition."""
        if self._end == len(self._tokens):
            self._tokens[: self._most] = self._tokens[self._most :]
            self._end = self._most
        last = self._tokens[self._end - self._most : self._end - self._least + 1]
        self._runs = (self._runs + 1) * (last[::-1] == token)
        self._tokens[self._end] = token
        self._end += 1
        return bool((self._runs >= self._needed).any())
