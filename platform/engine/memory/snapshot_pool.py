"""States of the prefix cache: a bounded number of slots, of which the least recently used is evicted. Sees integers
and hashes only."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class SnapshotPool:
    """Maps the hash of a block to the slot of the state after it.

    free  --allocate-->  being written  --publish-->  found by its hash  --evicted, or forgotten-->  free

    A slot that a sequence starts from is pinned until its step is committed, and stays until then.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._slots = frozenset(slots)
        self._free = sorted(self._slots, reverse=True)
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._pins: Counter[int] = Counter()
        self._forgotten: set[int] = set()  # pinned slots whose hash is gone

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def allocate(self) -> int | None:
        """A slot to write to, maybe of an evicted state; None: all are pinned or being written."""
        if not self._free:
            victim = next((digest for digest, slot in self._slot_of.items() if not self._pins[slot]), None)
            if victim is not None:
                self.forget(victim)
        return self._free.pop() if self._free else None

    def publish(self, digest: bytes, slot: int) -> bool:
        """Let a written slot be found. False if another already holds the state: that one stays."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            self.discard(slot)
            return False
        self._slot_of[digest] = slot
        return True

    def discard(self, slot: int) -> None:
        """Free a slot that was allocated, and not published."""
        self._free.append(slot)

    def pin(self, digest: bytes) -> int:
        """The slot of a hash, which becomes the last used one."""
        self._slot_of.move_to_end(digest)
        slot = self._slot_of[digest]
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Undo a `pin`."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                self._free.append(slot)

    def forget(self, digest: bytes) -> None:
        """Free the slot of a hash, if it has one, once it is not pinned."""
        slot = self._slot_of.pop(digest, None)
        if slot is None:
            return
        if self._pins[slot]:
            self._forgotten.add(slot)
        else:
            del self._pins[slot]
            self._free.append(slot)

    def reset(self) -> None:
        """Forget all states."""
        for digest in list(self._slot_of):
            self.forget(digest)

    def check_integrity(self, written: Sequence[int], pinned: Sequence[int]) -> None:
        """Raise AssertionError unless each slot is free, found, forgotten but pinned, or being `written`, and exactly
        `pinned` are pinned."""
        slots = [*self._free, *self._slot_of.values(), *self._forgotten, *written]
        assert len(slots) == len(self._slots), "slots of snapshots leak, or have two uses"
        assert frozenset(slots) == self._slots, "slots of snapshots leak, or have two uses"
        assert +self._pins == Counter(pinned), "pins do not match the sequences"
