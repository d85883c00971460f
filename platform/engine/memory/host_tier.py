"""KV blocks in host memory: content evicted from the device, found again by the hash of the prefix cache.

A preempted sequence leaves its full blocks in the prefix cache, as a finished one does. If the device needs one of
them, its content is copied to a slot of host memory, and back when a sequence continues with the same prefix. So
preemption by swap and a second level of the prefix cache are the same mechanism:

    device block  --handed out again (`keep`)-->  host slot  --a sequence starts (`take`, `put_back`)-->  device block

The host holds a bounded number of slots; the least recently used content is evicted. A hash covers tenant, salt and the
adapter's content, so no tenant finds another's blocks. This module decides and sees integers only: copies are `Move`s
of the next step's plan, which `HostStore` makes in their order before the step computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ...core.batch import Move, StepPlan
from .cache_events import HOST, CacheEvents

_SMOOTHING = 0.2
"""Weight of the latest step in the measured time of a prompt token."""
_FEWEST_PROMPT_TOKENS = 16
"""Minimum of prompt tokens in a step whose time gives that of one token."""


def swap_is_cheaper(block_bytes: int, bytes_per_second: float, block_tokens: int, tokens_per_second: float) -> bool:
    """Return True when copying a block to the host and back takes less time than computing its tokens again."""
    return 2 * block_bytes / bytes_per_second < block_tokens / tokens_per_second


class SwapCost:
    """Costs of swap and recompute, measured on this machine."""

    def __init__(self, block_bytes: int, block_tokens: int, bytes_per_second: float | None) -> None:
        """`bytes_per_second`: measured rate of copies; None: swap always."""
        self.block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._bytes_per_second = bytes_per_second
        self._prompt_token_seconds: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the time of a prompt token from a step with mostly prompt tokens."""
        prompts = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1 + row.num_drafts)
        if prompts < _FEWEST_PROMPT_TOKENS or 2 * prompts < plan.num_tokens or seconds <= 0:
            return
        each, known = seconds / plan.num_tokens, self._prompt_token_seconds
        self._prompt_token_seconds = each if known is None else known + _SMOOTHING * (each - known)

    def is_cheaper_than_recompute(self) -> bool:
        """Return whether blocks are worth a copy; True before a prompt was measured."""
        if self._bytes_per_second is None or self._prompt_token_seconds is None:
            return True
        rates = self._bytes_per_second, 1 / self._prompt_token_seconds
        return swap_is_cheaper(self.block_bytes, rates[0], self._block_tokens, rates[1])


class HostTier:
    """Maps hashes to slots of host memory, and lists the copies that the next step makes."""

    def __init__(self, num_slots: int, cost: SwapCost) -> None:
        self.cost = cost
        self.num_slots = num_slots
        self.num_hits = 0
        """Blocks that were copied back to the device."""
        self.events: CacheEvents | None = None
        """See `PrefixCache.record`."""
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._draft_ready: set[bytes] = set()  # their KV in the drafter's layers is valid too
        self._free = list(range(num_slots))
        self._moves: list[Move] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    @property
    def num_bytes(self) -> int:
        """Bytes of the content that is kept."""
        return len(self._slot_of) * self.cost.block_bytes

    def keep(self, digest: bytes, block: int, *, draft_ready: bool) -> None:
        """Copy a block whose content is leaving the device, unless it is here already, or recomputing it is cheaper."""
        if not self.cost.is_cheaper_than_recompute():
            return
        slot = self._slot_of.pop(digest, None)
        if slot is None or (draft_ready and digest not in self._draft_ready):
            if slot is None:
                slot = self._free.pop() if self._free else self._make_way()
                if slot is not None and self.events is not None:
                    self.events.stored_on_host(digest)
            if slot is None:
                return
            self._moves.append(Move(block, slot, to_host=True))
            if draft_ready:
                self._draft_ready.add(digest)
        self._slot_of[digest] = slot

    def _make_way(self) -> int | None:
        """The slot of the least recently used content; None if all contents are taken out."""
        if not self._slot_of:
            return None
        digest, slot = self._slot_of.popitem(last=False)
        self._draft_ready.discard(digest)
        self._record_removed(digest)
        return slot

    def take(self, digests: Sequence[bytes]) -> dict[bytes, tuple[int, bool]]:
        """Take contents out, so that they are not evicted while the device makes room: (slot, draft ready) by hash.
        `put_back` follows."""
        taken = {}
        for digest in digests:
            taken[digest] = (self._slot_of.pop(digest), digest in self._draft_ready)
            self._draft_ready.discard(digest)
        return taken

    def put_back(self, taken: Mapping[bytes, tuple[int, bool]], blocks: Sequence[int]) -> None:
        """Put contents back as the most recently used ones, and copy them to `blocks`, if any."""
        for digest, (slot, draft_ready) in taken.items():
            self._slot_of[digest] = slot
            if draft_ready:
                self._draft_ready.add(digest)
        self._moves += [
            Move(block, slot, to_host=False) for block, (slot, _) in zip(blocks, taken.values(), strict=False)
        ]
        self.num_hits += len(blocks)

    def forget(self, digest: bytes) -> None:
        """Free the slot of a content, if it has one."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            self._draft_ready.discard(digest)
            self._free.append(slot)
            self._record_removed(digest)

    def _record_removed(self, digest: bytes) -> None:
        if self.events is not None:
            self.events.removed(digest, HOST)

    def moves(self) -> tuple[Move, ...]:
        """Take the copies to make before the next step computes."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def reset(self) -> None:
        """Drop all contents, and the copies that no step has made yet."""
        for digest in self._slot_of:
            self._record_removed(digest)
        self._free = list(range(self.num_slots))  # including those left taken out by an interrupt
        self._slot_of.clear()
        self._draft_ready.clear()
        self._moves.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is free or holds one content."""
        assert sorted([*self._free, *self._slot_of.values()]) == list(range(self.num_slots)), "slots leak"
        assert self._draft_ready <= self._slot_of.keys(), "a forgotten content is ready for drafts"
