"""Bound on the tokens of reasoning: when they are used up, the tokens of its end are forced.

A state is a function of the sequence's own tokens: drafts are followed on a copy. So neither preemption nor rejected
drafts make it stale, and the text does not depend on drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ...core.request import Drafts, Request
from ...core.sampling_params import SamplingParams


class Mark(NamedTuple):
    """Tokens that begin or end the reasoning."""

    tokens: tuple[int, ...]
    fallbacks: tuple[int, ...]
    """For each prefix of the tokens, the length of the longest shorter one that it ends with (Knuth, Morris and Pratt
    1977)."""

    @classmethod
    def of_tokens(cls, tokens: Sequence[int]) -> Mark:
        """The mark of these tokens, at least one."""
        fallbacks = [0, 0]
        for token in tokens[1:]:
            length = fallbacks[-1]
            while length and tokens[length] != token:
                length = fallbacks[length]
            fallbacks.append(length + (tokens[length] == token))
        return cls(tuple(tokens), tuple(fallbacks))

    def follow(self, length: int, token: int) -> int:
        """Tokens of the mark that the text ends with after `token`, if it ended with `length` before, not all."""
        while length and self.tokens[length] != token:
            length = self.fallbacks[length]
        return length + (self.tokens[length] == token)

    def last_end(self, tokens: Sequence[int]) -> int:
        """Index after the last occurrence in `tokens`; -1: there is none."""
        backwards = tokens[::-1]
        wanted = list(self.tokens[::-1])
        place = -1
        while True:
            try:
                place = backwards.index(wanted[0], place + 1)
            except ValueError:
                return -1
            if list(backwards[place : place + len(wanted)]) == wanted:
                return len(tokens) - place


@dataclass(frozen=True, slots=True)
class ThinkingRule:
    """The marks of a request's reasoning, and its bound."""

    budget: int
    """Most tokens between the marks, all parts of the reasoning together."""
    start: Mark | None
    """None: the answer begins with the reasoning."""
    end: Mark

    @classmethod
    def read(cls, params: SamplingParams) -> ThinkingRule | None:
        """The rule of these parameters; None without a bound."""
        if params.thinking_token_budget is None:
            return None
        start = params.thinking_start_token_ids
        return cls(
            params.thinking_token_budget,
            None if start is None else Mark.of_tokens(start),
            Mark.of_tokens(params.thinking_end_token_ids or ()),
        )

    def at_start(self, prompt: Sequence[int]) -> Place:
        """Place at the start of an answer."""
        is_open = self.start is None or self.start.last_end(prompt) > self.end.last_end(prompt)
        return Place(is_open)

    def after(self, place: Place, tokens: Iterable[int]) -> Place:
        """Place after more tokens."""
        is_open, used, matched = place
        for token in tokens:
            if is_open:
                used += 1
                matched = self.end.follow(matched, token)
                if matched == len(self.end.tokens):
                    is_open, matched = False, 0
            elif self.start is not None:
                matched = self.start.follow(matched, token)
                if matched == len(self.start.tokens):
                    is_open, matched = True, 0
        return Place(is_open, used, matched)

    def forced(self, place: Place) -> int | None:
        """The only token that may come next; None: any one."""
        return self.end.tokens[place.matched] if place.is_open and place.used >= self.budget else None


class Place(NamedTuple):
    """Place in an answer."""

    is_open: bool
    """True inside the reasoning."""
    used: int = 0
    """Tokens of reasoning so far."""
    matched: int = 0
    """Tokens of the mark that would come next that the answer ends with."""


class Thinking:
    """Reasoning of one sequence."""

    def __init__(self, rule: ThinkingRule, request: Request) -> None:
        self.rule = rule
        self._place = rule.at_start(request.tokens[: request.num_prompt_tokens])
        self._num_seen = 0

    def place(self, request: Request) -> Place:
        """Place after the tokens that the sequence has."""
        new = request.tokens[request.num_prompt_tokens + self._num_seen :]
        if new:
            self._place = self.rule.after(self._place, new)
            self._num_seen += len(new)
        return self._place

    def forced_after(self, request: Request, drafts: Iterable[Sequence[int]]) -> int | None:
        """The only token that may come after the sequence's tokens and these."""
        return self.rule.forced(self.rule.after(self.place(request), chain.from_iterable(drafts)))

    def within_budget(self, request: Request, drafts: Drafts) -> Drafts:
        """The drafts before the end of the reasoning is forced. If that is now, they are its tokens."""
        place, end = self.place(request), self.rule.end.tokens
        if self.rule.forced(place) is not None:
            left = list(end[place.matched :])
            same = list(drafts.token_ids[: len(left)]) == left
            return drafts if same else Drafts(left, forced=True)
        for count, token in enumerate(drafts.token_ids):
            wanted = self.rule.forced(place)
            if wanted is not None and wanted != token:
                return drafts.truncated(count)
            place = self.rule.after(place, (token,))
        return drafts
