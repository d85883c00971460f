"""Prompt lookup: the text that followed an earlier occurrence of the last few tokens (Saxena 2023, "Prompt Lookup
Decoding").

Each request is looked up in its own tokens, in corpora, and in the answers of its group (`answers`), so nothing of one
tenant's text reaches another's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import torch

from ...platform.core.request import NO_DRAFTS, Drafts, Request, Status
from ...platform.core.speculative_config import SpeculativeConfig
from .answers import AnswerGroups, make_groups
from .base import Drafter, DraftRow, Proposal, TargetOutput
from .corpus import Corpora, load_corpora
from .factory import DrafterContext

MAX_CHANCE = 0.98
"""Bound of a draft's chance when it is taken as the odds of a match, of 49 tokens."""
_FEW_PLACES = 24
"""Earlier positions of the last tokens that are checked one by one."""
_LONGEST = 32
"""Most tokens of a match that are counted."""
_FEWEST = 3
"""Drafts after the shortest match: on the 494M model verifying one takes a quarter of a step more, and each further one
a twentieth, so one alone gains nothing."""


def lookup(tokens: np.ndarray, min_n: int, max_n: int) -> int:
    """Position after an earlier occurrence of the longest repeated suffix of `tokens`.

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
    """A request's tokens with an index: the last position of each run of `min_n` tokens, and the one before it.

    Checking a few positions is faster than an array operation; for many, `lookup` is used.
    """

    def __init__(self, request: Request, min_n: int, max_n: int) -> None:
        self.request = request
        self._min_n, self._max_n = min_n, max_n
        self._last: dict[int | tuple[int, ...], int] = {}
        self._before: list[int] = []  # by the position of a run's last token: the one before it; -1: none
        self.tokens: list[int] = []
        self._array = np.empty(0, dtype=np.int32)  # made when it is needed

    def update(self, new: Sequence[int]) -> None:
        """Append the new tokens of `new`, which extends that of the call before."""
        tokens, last, before, n = self.tokens, self._last, self._before, self._min_n
        tokens += new[len(tokens) :]
        for end in range(len(before), len(tokens)):
            key = tokens[end] if n == 1 else tuple(tokens[max(0, end - n + 1) : end + 1])
            before.append(last.get(key, -1))
            last[key] = end

    def continuation(self) -> int:
        """`lookup` in the tokens."""
        tokens = self.tokens
        shortest, longest = self._min_n, min(self._max_n, len(tokens) - 1)
        if longest < shortest:
            return -1
        found, found_length = -1, shortest - 1
        place = self._before[-1]
        for _ in range(_FEW_PLACES):
            if place < 0:
                return found
            length = shortest
            most = min(longest, place + 1)
            while length < most and tokens[place - length] == tokens[-1 - length]:
                length += 1
            if length > found_length:
                found, found_length = place + 1, length
                if length == longest:
                    return found
            place = self._before[place]
        return found if place < 0 else lookup(self._as_array(tokens), shortest, longest)

    def match_length(self, start: int, limit: int) -> int:
        """Number of tokens before `start` that are equal to the last ones, at most `limit`."""
        tokens = self.tokens
        length = 1
        while length < min(limit, start) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _as_array(self, tokens: list[int]) -> np.ndarray:
        new = tokens[len(self._array) :]  # a long list takes longer to turn into an array than to search
        self._array = np.concatenate([self._array, np.array(new, dtype=np.int32)])
        return self._array


def load(config: SpeculativeConfig, context: DrafterContext) -> NgramDrafter:
    """Build the drafter of `config`, and load its corpora if there are any: those are searched on the host alone.

    Raises:
        NotFoundError, InvalidRequestError: see `load_corpora`.
    """
    from . import ngram_device

    ns, device = (config.prompt_lookup_min, config.prompt_lookup_max), torch.device(context.device)
    corpora = load_corpora(config, context)
    if corpora is not None or config.group_drafts == "prompt" or not ngram_device.runs_on(device):
        return NgramDrafter(*ns, by_match=config.adaptive, corpora=corpora, groups=make_groups(config))
    return ngram_device.DeviceNgramDrafter(
        *ns,
        by_match=config.adaptive,
        max_rows=context.max_num_seqs,
        max_tokens=context.max_model_len,
        device=device,
    )


class NgramDrafter(Drafter):
    """Drafts copied from the request's own earlier tokens, or from corpora if more tokens match there, or from the
    answers of its group if more of them are expected to be right. Owns no KV; they are certain: `Drafts.probs` is
    None."""

    def __init__(
        self,
        min_n: int,
        max_n: int,
        *,
        by_match: bool = False,
        corpora: Corpora | None = None,
        groups: AnswerGroups | None = None,
    ) -> None:
        """`by_match`: make at most 2 n - 1 drafts, or `_FEWEST`, after a match of n tokens. On chats of SmolLM2-135M a
        match of one token is followed by 0.4 correct drafts on average, of four by 3.6 and of eight by 6.8."""
        self._min_n = min_n
        self._max_n = max_n
        self._by_match = by_match
        self._corpora = corpora
        self._groups = groups
        self._histories: dict[str, _History] = {}  # by request id; of live requests only

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Draft the text that followed last time; at the sequence's end it continues with its own copy (a loop)."""
        self._forget_finished()
        if self._groups is None:
            return [Proposal(self._draft(row), len(row.tokens)) for row in rows]
        self._groups.update(rows)
        return [Proposal(self._better(row, self._draft(row)), len(row.tokens)) for row in rows]

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Drop finished requests. The histories of the others are updated when they draft."""
        self._forget_finished()

    def _draft(self, row: DraftRow) -> Drafts:
        if row.max_drafts < 1 or not row.sampled:
            return NO_DRAFTS
        history = self._histories.get(row.request.request_id)
        if history is None or history.request is not row.request:
            history = self._histories[row.request.request_id] = _History(row.request, self._min_n, self._max_n)
        history.update(row.tokens)
        start, count = history.continuation(), row.max_drafts
        if self._corpora is not None:
            length = history.match_length(start, self._max_n) if start >= 0 else 0
            if length < self._max_n and (found := self._from_corpora(row, max(length + 1, self._min_n))):
                return found
        if start < 0:
            return NO_DRAFTS
        length = history.match_length(start, max(_LONGEST, count // 2 + 1))
        if self._by_match:
            count = min(count, max(_FEWEST, 2 * length - 1))
        period = history.tokens[start : start + count]
        repeats = -(-count // len(period))
        return self._rated(row, (period * repeats)[:count], length)

    def _rated(self, row: DraftRow, drafts: list[int], length: int) -> Drafts:
        """Drafts after a match of `length` tokens, with their confidence: after n equal tokens n / (n + 1), odds of n
        to 1. Each right draft makes the match longer."""
        if not self._by_match or not row.is_rated:
            return Drafts(drafts, match_length=length)
        confidence = [n / (n + 1) for n in range(length, length + len(drafts))]
        return Drafts(drafts, confidence=confidence, match_length=length)

    def _better(self, row: DraftRow, own: Drafts) -> Drafts:
        """`own`, or drafts from the answers of the request's group if more of those are expected to be right."""
        assert self._groups is not None
        found, chances = self._groups.drafts(row) if row.max_drafts > 0 and row.sampled else ([], [])
        length = own.match_length
        # Odds of n to 2 after a match of n tokens, as of one answer in a table.
        ends = range(length + 1, length + len(own.token_ids) + 1)
        expected = sum(length * (length + 1) / (end * (end + 1)) for end in ends)
        if sum(accumulate(chances, mul)) <= expected:
            return own
        likely = min(chances[0], MAX_CHANCE)
        odds = max(1, round(likely / (1.0 - likely)))
        return Drafts(found, confidence=chances if row.is_rated and self._by_match else (), match_length=odds)

    def _from_corpora(self, row: DraftRow, least: int) -> Drafts | None:
        """Drafts after a match of at least `least` tokens in the corpora; None without one."""
        assert self._corpora is not None
        count, longest = row.max_drafts, max(self._max_n, row.max_drafts // 2 + 1 if self._by_match else 0)
        drafts, length = self._corpora.drafts(row.request.tenant, row.tokens, longest, least, count)
        if not drafts:
            return None
        return self._rated(row, drafts[: max(_FEWEST, 2 * length - 1)] if self._by_match else drafts, length)

    def forget_adapter(self, digest: bytes) -> None:
        """See `Drafter`."""
        if self._groups is not None:
            self._groups.forget_adapter(digest)

    def _forget_finished(self) -> None:
        if self._groups is not None:
            self._groups.forget_finished()
        finished = [key for key, history in self._histories.items() if history.request.status is Status.FINISHED]
        for key in finished:
            del self._histories[key]
