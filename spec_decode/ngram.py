"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023, "Prompt Lookup Decoding").

Each request is looked up in its own tokens only, so nothing of one tenant's text reaches another's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..platform.core.request import NO_DRAFTS, Drafts, Request, Status
from .proposer import AdapterPreparer, DraftRow, Proposal, ProposerNeeds, TargetOutput

if TYPE_CHECKING:
    from ..models.batch import LayerKV


def lookup(tokens: np.ndarray, min_n: int, max_n: int) -> int:
    """Where the longest repeated suffix of `tokens` continues.

    Args:
        tokens: [T] int32.
        min_n, max_n: the suffix has between `min_n` and `max_n` tokens.

    Returns:
        the index after the most recent earlier occurrence of the longest suffix that occurs earlier, in [min_n, T); -1
        when none does. Occurrences may overlap the suffix.
    """
    longest = min(max_n, len(tokens) - 1)
    if longest < min_n:
        return -1
    suffix = tokens[-longest:][::-1].tolist()
    ends = np.flatnonzero(tokens[:-1] == suffix[0])  # last tokens of occurrences; fewer with every token compared
    found = -1
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == suffix[length - 1]]
        if not ends.size:
            break
        if length >= min_n:
            found = int(ends[-1]) + 1
    return found


class _History:
    """A request's tokens as an array that grows: turning a long list into one anew takes longer than a lookup."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._buffer = np.empty(256, dtype=np.int32)
        self._length = 0

    def update(self, tokens: list[int]) -> np.ndarray:
        """The array of `tokens`, which extend those of the call before."""
        new = tokens[self._length :]
        length = len(tokens)
        if length > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(length, dtype=np.int32)])
        self._buffer[length - len(new) : length] = new
        self._length = length
        return self._buffer[:length]


class NgramProposer:
    """Drafts copied from the request's own earlier tokens. Owns no KV; they are certain: `Drafts.probs` is None."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._histories: dict[str, _History] = {}  # by request id; of live requests only

    @property
    def needs(self) -> ProposerNeeds:
        """Nothing."""
        return ProposerNeeds()

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Nothing to bind."""

    def forget_adapter(self, digest: bytes) -> None:
        """Nothing outlives a request."""

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """What followed last time; where that runs into the sequence's end, it goes on with its own copy (a loop)."""
        self._forget_finished()
        return [Proposal(self._draft(row), len(row.tokens)) for row in rows]

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Nothing is missed: histories catch up with the tokens."""
        self._forget_finished()

    def _draft(self, row: DraftRow) -> Drafts:
        if row.max_drafts < 1 or not row.sampled:
            return NO_DRAFTS
        history = self._histories.get(row.request.request_id)
        if history is None or history.request is not row.request:
            history = self._histories[row.request.request_id] = _History(row.request)
        tokens = history.update(row.tokens)
        start = lookup(tokens, self._min_n, self._max_n)
        if start < 0:
            return NO_DRAFTS
        period = tokens[start : start + row.max_drafts].tolist()
        repeats = -(-row.max_drafts // len(period))
        return Drafts((period * repeats)[: row.max_drafts])

    def _forget_finished(self) -> None:
        finished = [key for key, history in self._histories.items() if history.request.status is Status.FINISHED]
        for key in finished:
            del self._histories[key]
