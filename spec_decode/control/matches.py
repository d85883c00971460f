"""Matches: prompt lookup's drafts verified instead of those of the neural drafter, by the length of the match.

For each request that the neural drafter may draft for, prompt lookup is asked first; that costs some 10 microseconds.
Its drafts are compared with the text that follows, whether or not they are verified, so the acceptance after a match of
each class of lengths is known for every adapter without trials, and so is that of prompt lookup instead of the neural
drafter. They are verified if more of them are expected to be
right than of the neural drafter's: then that one does not run for the request, and catches up later.
"""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import ADAPTER_MEMORY, NUM_POOLS, AcceptanceRate, adapter_rates, pool_of, survival


def _first_rate(match_class: int) -> float:
    """Expected acceptance after a match before any was compared: n / (n + 1) after n tokens. On chats of SmolLM2-135M
    0.4, 3.6 and 6.8 drafts were right after 1, 4 and 8 tokens, for rates of 0.3, 0.8 and 0.9."""
    length = next(n for n in range(1, 100) if pool_of(n - 1) == match_class)
    return length / (length + 1.0)


FIRST_RATES = tuple(_first_rate(match_class) for match_class in range(NUM_POOLS))
"""[NUM_POOLS] by class of lengths: 1, 2, 3, 4-5, 6-8 and 9 or more tokens."""


class MatchRates:
    """Acceptance of prompt lookup's drafts by the length of their match, of one adapter's requests."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [AcceptanceRate(ADAPTER_MEMORY) for _ in range(NUM_POOLS)]

    def expected(self, length: int, num_drafts: int) -> float:
        """Expected number of right drafts of `num_drafts` after a match of `length` tokens."""
        return sum(self.survival(length, num_drafts))

    def survival(self, length: int, count: int) -> list[float]:
        """[count] probability that the draft at each position and all before it are right."""
        match_class = pool_of(length - 1)
        return survival(adapter_rates(self._counts[match_class], FIRST_RATES[match_class]), count)

    def compare(self, match: Match, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Count a match against the tokens that the request has now. Returns the look-up as a round of drafts that the
        text could confirm: numbers requested, made and right."""
        num_asked = min(len(tokens) - match.position, match.num_asked)
        num_drafts = max(0, min(len(match.token_ids), num_asked))
        right = 0
        while right < num_drafts and tokens[match.position + right] == match.token_ids[right]:
            right += 1
        if num_drafts:
            self._counts[pool_of(match.length - 1)].add_round(num_drafts, num_drafts, right)
        return num_asked, num_drafts, right


class Match:
    """Prompt lookup's drafts for a request after one step; maybe none."""

    __slots__ = ("is_used", "length", "num_asked", "position", "token_ids")

    def __init__(self, position: int, token_ids: Sequence[int], length: int, num_asked: int) -> None:
        self.position = position
        """Index in the sequence of the first draft."""
        self.token_ids = token_ids
        self.length = length
        """Number of tokens that matched; 0: no match."""
        self.num_asked = num_asked
        """Number of drafts that were requested."""
        self.is_used = False
        """True if these drafts are verified."""
