"""Sequences of one request with `n` > 1: one of them computes the prompt first, and together they leave seats free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...core.request import Request


class Siblings:
    """Unfinished sequences by their group. Sequences without one are ignored."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._seats, self._block_size = max_num_seqs, block_size
        self._members: dict[str, list[Request]] = {}  # the first of each group leads
        self._running: Counter[str] = Counter()  # by group; of "", which is none, never asked

    def __contains__(self, group: str | None) -> bool:
        """True while a group has unfinished sequences."""
        return group in self._members

    def add(self, request: Request) -> None:
        """Add a queued sequence."""
        if request.group is not None:
            self._members.setdefault(request.group, []).append(request)

    def start(self, request: Request) -> None:
        """Count a sequence that starts to run."""
        self._running[request.group or ""] += 1

    def stop(self, request: Request) -> None:
        """Count a sequence that no longer runs."""
        self._running[request.group or ""] -= 1

    def remove(self, request: Request) -> None:
        """Remove a finished sequence, which no longer runs."""
        if request.group is not None:
            members = self._members[request.group]
            members.remove(request)
            if not members:
                del self._members[request.group], self._running[request.group]

    def block(self, request: Request) -> bool:
        """True when a sequence must wait for its siblings."""
        return request.group is not None and (self._awaits_leader(request) or self._leaves_seats(request))

    def _awaits_leader(self, request: Request) -> bool:
        """True while a sibling computes the prompt blocks that this sequence can then share."""
        if request.num_prompt_tokens - 1 < self._block_size:
            return False
        leader = self._members[request.group or ""][0]
        return leader is not request and leader.num_computed_tokens < leader.num_prompt_tokens

    def _leaves_seats(self, request: Request) -> bool:
        """True when its siblings run in all seats but those that one request leaves to others: an eighth of them."""
        return self._running[request.group or ""] >= self._seats - self._seats // 8

    def check_integrity(self, running: Iterable[Request], unfinished: Iterable[Request]) -> None:
        """Raise AssertionError unless counts and groups agree with the queue's."""
        assert +self._running == Counter(request.group or "" for request in running), "siblings are miscounted"
        grouped = {request for members in self._members.values() for request in members}
        assert grouped == {request for request in unfinished if request.group is not None}
