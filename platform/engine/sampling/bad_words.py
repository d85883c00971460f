"""Bad words as an automaton: the cost of a step depends on its new tokens, not on the number of words.

The states are prefixes of words (Aho and Corasick 1975). A sequence is in the state of the longest prefix that its
generated tokens end with; each state has the tokens that would complete a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_MAX_REMEMBERED = 64
"""States whose banned tokens are kept as an array: most sequences are in few."""


class BadWords:
    """The words of one request, shared by its sequences. Only `banned` changes it: it caches."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """Takes about two microseconds a token. `words`: token ids, at least one each."""
        self._next: dict[tuple[int, int], int] = {}  # (state, token) -> the state one token longer
        self._last: list[list[int]] = [[]]  # of each state, the tokens that complete a word with that prefix
        self._fallback = [0]  # the longest other state that it ends with
        for word in words:
            state = 0
            for token in word[:-1]:
                state = self._next.setdefault((state, token), len(self._last))
                if state == len(self._last):
                    self._last.append([])
            self._last[state].append(word[-1])
        self._link()
        self._remembered: dict[int, np.ndarray] = {}

    def _link(self) -> None:
        """Find the fallbacks, of short states first."""
        children: list[list[tuple[int, int]]] = [[] for _ in self._last]
        for (state, token), child in self._next.items():
            children[state].append((token, child))
        self._fallback = [0] * len(self._last)
        # The nearest fallback that bans a token, to skip those in between.
        self._banning = [0] * len(self._last)
        ordered = [0]
        for state in ordered:  # grows
            for token, child in children[state]:
                fallback = self.advance(self._fallback[state], (token,)) if state else 0
                self._fallback[child] = fallback
                self._banning[child] = fallback if self._last[fallback] else self._banning[fallback]
                ordered.append(child)

    def advance(self, state: int, tokens: Iterable[int]) -> int:
        """The state after more tokens; 0 is that of no tokens."""
        following, fallback = self._next, self._fallback
        for token in tokens:
            while (state, token) not in following and state:
                state = fallback[state]
            state = following.get((state, token), 0)
        return state

    def banned(self, state: int) -> np.ndarray:
        """[N] int64: the tokens that would complete a word now."""
        found = self._remembered.get(state)
        if found is None:
            tokens, at = set(self._last[0]), state
            while at:
                tokens.update(self._last[at])
                at = self._banning[at]
            found = np.fromiter(tokens, np.int64, len(tokens))
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[state] = found
        return found
