"""KV blocks: reference counts and an LRU list of free ones. Sees integers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence


class BlockPool:
    """Hands out the block numbers [0, num_blocks).

    A block is *in use* while its reference count is above zero, else *free*. A free block keeps its content until it is
    handed out again, so that the prefix cache can revive it with `acquire`; `on_reuse` notifies the cache when it is
    reused.

        in use  --release to 0-->  free (most recently used end)  --allocate from the least recently used end-->  in use

    Blocks without cached content (`keeps`) are handed out first, the last released one before the others: cached
    content is not lost while there is one, and its memory may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_reuse: Callable[[int], None] = lambda block: None
        self.keeps: Callable[[int], bool] = lambda block: True
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def num_references(self, block: int) -> int:
        """References to the block."""
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """True when there is no reference to the block."""
        return self._references[block] == 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None, without a change, if there are not enough."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.on_reuse(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def grow(self, blocks: MutableSequence[int], count: int) -> bool:
        """Allocate until `blocks` are `count`; False, without a change, if there are not enough."""
        if count <= len(blocks):
            return True
        more = self.allocate(count - len(blocks))
        if more is None:
            return False
        blocks.extend(more)
        return True

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free one is revived with its content."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. The last of `blocks` becomes the first to be reused among them,
        so that a cached prefix loses its tail first."""
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if not self.keeps(block):
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, owners: Iterable[Iterable[int]] = ()) -> None:
        """Raise AssertionError unless counts match the `owners`' block lists and the free list is exactly the rest."""
        expected = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                expected[block] += 1
        assert expected == self._references, "reference counts do not match the owners"
        free = {block for block, count in enumerate(self._references) if count == 0}
        assert free == set(self._free), "the free list does not match the reference counts"
