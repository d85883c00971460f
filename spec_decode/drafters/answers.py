"""Answers to one prompt draft for each other (grouped speculative decoding: Qin et al. 2025, "Seer", arXiv 2511.14617;
Shao et al. 2025, "Beat the Long Tail", arXiv 2511.13841).

Samples of one prompt often say the same in the same words. The answers of a group share a table: the tokens that
followed each context of 1, 2, 4 and 8 tokens so far, with counts. The chance of a next token w backs off from longer
contexts to shorter ones, with a weight B:

    p_n(w) = (count_n(w) + B p_m(w)) / (count_n + B)        m: the next shorter context, p_0 = 0

The most frequent token after the longest known context is drafted, then the one after it. A table grows with each
token of a running answer, so those behind learn from those ahead. Drafts are certain, and depend on a request's own
tokens and on earlier steps of others, which are drawn with other noise: verification keeps the distribution of each
answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from ...platform.core.request import Request, Status
from ...platform.core.speculative_config import SpeculativeConfig
from .base import DraftRow

CONTEXTS = (1, 2, 4, 8)
"""Numbers of tokens of the contexts that are counted. Those of 3, 6 and 9 added 1% to the tokens of a step."""
BACK_OFF = 2.0
"""Weight of the next shorter context, as a number of tokens that followed: with 32 answers of SmolLM2-135M at
temperature 1 drafts of a chance of 0.87 were right in 0.72, and with a weight of 1 in 0.53."""
LEAST_SURVIVAL = 0.2
"""Drafts end before the chance that all of them are right falls below this."""
STEP_TOKENS = 64
"""Most tokens of a request that a step adds, at some 3 microseconds each: more are waiting after steps that drafted
nothing."""
IDLE_STEPS = 256
"""Steps after which the group of a request is dropped if none of its answers ran: some may wait until others end."""
_TOKEN = 0xFFFFFFFF
_TOTAL, _BEST = -2, -1
"""Keys of a context with several next tokens, in addition to the tokens themselves."""

GroupKey = tuple[tuple[bytes, bytes], bytes]
"""(`Request.text_namespace`, request or digest of the prompt): answers with the same key draft for each other."""


def make_groups(config: SpeculativeConfig) -> AnswerGroups | None:
    """The groups that `config` asks for."""
    return None if config.group_drafts == "off" else AnswerGroups(config.group_drafts, config.group_max_tokens)


class AnswerTable:
    """Counts of the tokens that followed each context in the answers of a group."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens that are counted."""
        self.used_at = 0
        """Number of the step that added the last of them."""
        # By context: count << 32 | token while one token alone has followed; else the counts by token.
        self._next: dict[tuple[int, ...], int | dict[int, int]] = {}

    @property
    def num_contexts(self) -> int:
        """Number of different contexts; the memory is proportional to it."""
        return len(self._next)

    def add(self, tokens: Sequence[int], start: int, stop: int) -> None:
        """Count `tokens[start:stop]`, each after the tokens before it."""
        for position in range(start, stop):
            token = tokens[position]
            for length in CONTEXTS:
                if length > position:
                    break
                self._count(tuple(tokens[position - length : position]), token)
        self.num_tokens += stop - start

    def _count(self, context: tuple[int, ...], token: int) -> None:
        entry = self._next.get(context)
        if entry is None:
            self._next[context] = 1 << 32 | token
        elif isinstance(entry, int):
            only, count = entry & _TOKEN, entry >> 32
            if only == token:
                self._next[context] = entry + (1 << 32)
            else:
                self._next[context] = {_TOTAL: count + 1, _BEST: only if count > 1 else token, only: count, token: 1}
        else:
            entry[_TOTAL] += 1
            entry[token] = count = entry.get(token, 0) + 1
            if count >= entry[entry[_BEST]]:
                entry[_BEST] = token  # of equally frequent ones the one seen last

    def continuation(self, tokens: Sequence[int], limit: int) -> tuple[list[int], list[float]]:
        """The most likely continuation of `tokens`, of at most `limit` tokens.

        Returns:
            (tokens, chance of each if those before it are right).
        """
        context = tuple(tokens[-CONTEXTS[-1] :])
        found: list[int] = []
        chances: list[float] = []
        survival = 1.0
        while len(found) < limit:
            token, chance = self._most_likely(context)
            survival *= chance
            if survival < LEAST_SURVIVAL:
                break
            found.append(token)
            chances.append(chance)
            context = (*context[-CONTEXTS[-1] + 1 :], token)
        return found, chances

    def _most_likely(self, context: tuple[int, ...]) -> tuple[int, float]:
        """(most frequent token after the longest context that is known, its chance); a chance of 0 if none is known."""
        entries: list[int | dict[int, int]] = []
        for length in CONTEXTS:
            entry = self._next.get(context[-length:]) if length <= len(context) else None
            if entry is None:
                break  # nor is a longer one known
            entries.append(entry)
        if not entries:
            return -1, 0.0
        longest, chance = entries[-1], 0.0
        token = longest & _TOKEN if isinstance(longest, int) else longest[_BEST]
        for entry in entries:
            if isinstance(entry, int):
                total = entry >> 32
                count = total if entry & _TOKEN == token else 0
            else:
                total, count = entry[_TOTAL], entry.get(token, 0)
            chance = (count + BACK_OFF * chance) / (total + BACK_OFF)
        return token, chance


class _Member:
    """A running request of a group."""

    __slots__ = ("key", "num_counted", "request")

    def __init__(self, request: Request, key: GroupKey | None) -> None:
        self.request = request
        self.key = key
        """None: its adapter is gone."""
        self.num_counted = request.num_prompt_tokens
        """Leading tokens that the table has, prompt included."""


class AnswerGroups:
    """The groups of an engine, bounded together: the least recently used one is dropped first. A group whose requests
    still run starts again with their next tokens."""

    def __init__(self, scope: str, max_tokens: int) -> None:
        """`scope`: "request" or "prompt", see `SpeculativeConfig.group_drafts`; `max_tokens`: most of all groups."""
        self._by_prompt = scope == "prompt"
        self._max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens of all groups."""
        self._num_steps = 0
        self._tables: OrderedDict[GroupKey, AnswerTable] = OrderedDict()  # the most recently used last
        self._members: dict[str, _Member] = {}  # by request id

    def __len__(self) -> int:
        return len(self._tables)

    def update(self, rows: Sequence[DraftRow]) -> None:
        """Add the new tokens of running requests, after `forget_finished`."""
        for row in rows:
            request = row.request
            if request.status is Status.FINISHED or request.params.max_drafts == 0:
                continue
            member = self._members.get(request.request_id)
            if member is None or member.request is not request:
                if not self._by_prompt and request.group is None:
                    continue
                member = self._members[request.request_id] = _Member(request, self._key(request))
            self._add(member, row.tokens)

    def drafts(self, row: DraftRow) -> tuple[list[int], list[float]]:
        """See `AnswerTable.continuation`; nothing for a request without a group."""
        member = self._members.get(row.request.request_id)
        table = None if member is None or member.key is None else self._tables.get(member.key)
        return ([], []) if table is None else table.continuation(row.tokens, row.max_drafts)

    def forget_finished(self) -> None:
        """Add the last tokens of finished requests; called once a step. Groups of a prompt stay for later requests."""
        self._num_steps += 1
        finished = [name for name, member in self._members.items() if member.request.status is Status.FINISHED]
        for name in finished:
            member = self._members.pop(name)
            self._add(member, member.request.tokens)
        if self._tables and not self._by_prompt:
            oldest, table = next(iter(self._tables.items()))
            if self._num_steps - table.used_at > IDLE_STEPS:
                self._drop(oldest)

    def forget_adapter(self, digest: bytes) -> None:
        """Drop the groups of an adapter's content; answers of running requests with it start none."""
        for key in [key for key in self._tables if key[0][1] == digest]:
            self._drop(key)
        for member in self._members.values():
            if member.key is not None and member.key[0][1] == digest:
                member.key = None

    def _key(self, request: Request) -> GroupKey:
        if self._by_prompt:
            prompt = array("q", request.tokens[: request.num_prompt_tokens])
            return request.text_namespace, blake2b(prompt, digest_size=16).digest()
        assert request.group is not None
        return request.text_namespace, request.group.encode()

    def _add(self, member: _Member, tokens: Sequence[int]) -> None:
        start, stop = member.num_counted, min(len(tokens), member.num_counted + STEP_TOKENS)
        if member.key is None or start >= stop:
            return
        table = self._tables.setdefault(member.key, AnswerTable())
        self._tables.move_to_end(member.key)
        table.add(tokens, start, stop)
        table.used_at = self._num_steps
        member.num_counted = stop
        self.num_tokens += stop - start
        while self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._tables)))

    def _drop(self, key: GroupKey) -> None:
        self.num_tokens -= self._tables.pop(key).num_tokens
