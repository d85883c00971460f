"""Slots of recurrent states: those of running sequences, and the prefix cache's.

A running sequence holds a ring of slots, in which the state of length n is in slot n modulo their number. A step reads
the state that its row starts with, and writes those of the last lengths: after rejected drafts the next row reads
the state of the accepted length, and nothing is copied.

A cached prefix is of use only if the state after it is there too. So rows also write the states after some blocks of
theirs to slots of a `SnapshotPool`: after each `SNAPSHOT_BLOCKS`-th block, after the last block of a prompt from which
the same prompt may start, and after the last full block so far. The last one replaces the sequence's one before: with
it a preempted sequence, or the next turn of a conversation, loses less than a block. States are found by the block's
hash, which keeps tenants and adapters apart, once the step is committed. A sequence reads the state that it starts with
where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...core.batch import RowPlan, RowStates
from ...core.request import Request
from ...core.state_size import StateConfig
from ..queue.gates import Gate
from .snapshot_pool import SnapshotPool

SNAPSHOT_BLOCKS = 16
"""Blocks between two states of the prefix cache within a sequence: 256 tokens of the default size. A state of
Qwen3-Next has the bytes of the KV of 3,000 tokens."""
NOTHING = 0, 0
"""Length and slot of the state before the first token."""


@dataclass(slots=True)
class _Held:
    """Slots of one sequence."""

    ring: Sequence[int]
    origin: tuple[int, int] = NOTHING
    """(length, slot) of the state that it started with; the slot is pinned."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """(length, slot) of snapshots that rows in flight write."""
    latest: bytes | None = None
    """Hash of its last full block, if the state after it is to be replaced by that of a later one."""


class StateSlots(Gate):
    """Hands out rings of slots to running sequences, and plans what rows read and write."""

    def __init__(self, config: StateConfig, block_size: int, snapshot_blocks: int = SNAPSHOT_BLOCKS) -> None:
        size = config.ring_size
        first_snapshot = 1 + size * config.num_rings
        self._num_rings = config.num_rings
        self._free: list[Sequence[int]] = []
        self._free += (range(first, first + size) for first in range(first_snapshot - size, 0, -size))
        self._held: dict[Request, _Held] = {}
        self._block_size = block_size
        self._interval = snapshot_blocks * block_size
        self.snapshots = SnapshotPool(range(first_snapshot, 1 + config.num_slots))

    # --- slots of a running sequence ---

    def admit(self, request: Request) -> str | None:
        """Give a sequence its ring."""
        if request not in self._held:
            if not self._free:
                return "capacity"
            self._held[request] = _Held(self._free.pop())
        return None

    def release(self, request: Request) -> None:
        """Take all slots of a sequence back: it has nothing computed any more."""
        held = self._held.pop(request, None)
        if held is not None:
            self._leave(held)
            for _, slot in held.written:
                self.snapshots.discard(slot)
            self._free.append(held.ring)

    def forget(self, request: Request) -> None:
        """See `release`."""
        self.release(request)

    # --- prefixes ---

    def num_resumable(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks after the last of which there is a state."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self.snapshots), 0)

    def begin(self, request: Request, num_tokens: int) -> None:
        """Let a sequence continue after a cached prefix of `num_tokens`; 0: from its first token."""
        held = self._held.get(request)
        if held is None:
            assert num_tokens == 0, "a sequence that starts holds slots"
            return
        origin = NOTHING
        if num_tokens:
            origin = num_tokens, self.snapshots.pin(request.block_hashes[num_tokens // self._block_size - 1])
        self._leave(held)
        held.origin = origin

    def _leave(self, held: _Held) -> None:
        if held.origin != NOTHING:
            self.snapshots.unpin(held.origin[1])
            held.origin = NOTHING

    # --- rows ---

    def plan(self, rows: Iterable[RowPlan]) -> None:
        """Set the `states` of the rows of a step."""
        for row in rows:
            held = self._held[row.request]
            slots = ((length, self.snapshots.allocate()) for length in self._lengths(row))
            written = [(length, slot) for length, slot in slots if slot is not None]
            held.written += written
            row.states = RowStates(held.ring, 2 + row.num_drafts, held.origin, written)

    def _lengths(self, row: RowPlan) -> list[int]:
        """Lengths within a row of which the prefix cache gets the states."""
        request, size = row.request, self._block_size
        if request.namespace is None:
            return []
        if row.awaits_token and request.in_flight[-1].num_drafts:
            return []  # it may start earlier than planned
        found = set(range((row.start // self._interval + 1) * self._interval, row.end + 1, self._interval))
        for length in (self._prompt_end(request), row.end // size * size):
            if row.start < length <= row.end:
                found.add(length)
        return sorted(found)

    def _prompt_end(self, request: Request) -> int:
        """Length of the longest prefix of its prompt from which the same prompt may start."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def commit(self, row: RowPlan) -> None:
        """Publish the snapshots of a committed row of a running sequence, but for those of rejected drafts. The hashes
        of its full blocks are there."""
        request, held = row.request, self._held[row.request]
        valid = min(request.num_computed_tokens, len(request.tokens))
        for length, slot in () if row.states is None else row.states.snapshots:
            held.written.remove((length, slot))
            if length > valid:
                self.snapshots.discard(slot)
                continue
            digest = request.block_hashes[length // self._block_size - 1]
            is_new = self.snapshots.publish(digest, slot)
            if held.latest is not None:
                self.snapshots.forget(held.latest)
            lasts = length % self._interval == 0 or length == self._prompt_end(request)
            held.latest = digest if is_new and not lasts else None
        if request.num_computed_tokens > held.origin[0]:
            self._leave(held)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot has one use."""
        rings = [*self._free, *(held.ring for held in self._held.values())]
        assert len({slot for ring in rings for slot in ring}) == sum(map(len, rings)), "rings overlap"
        assert len(rings) == self._num_rings, "rings leak"
        written = [slot for held in self._held.values() for _, slot in held.written]
        pinned = [held.origin[1] for held in self._held.values() if held.origin != NOTHING]
        self.snapshots.check_integrity(written, pinned)
