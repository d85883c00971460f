"""Prefixes of prompts whose KV all tenants may share: the operator has declared that they are no secret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SharedPrefixes:
    """Finds the longest common prefix of a prompt and a declared prefix.

    Only whole KV blocks can be shared, so the prefixes are cut into blocks, and these make a tree: a prompt is looked
    up by its first block, then by its second among those that follow it, and so on. That costs one look-up for each
    block that is shared, however many prefixes there are, and one for a prompt that begins like none.
    """

    def __init__(self, prefixes: Iterable[Sequence[int]] = (), block_size: int = 1) -> None:
        """
        Args:
            prefixes: Token ids.
            block_size: Of the engine's KV cache.
        """
        self._block_size = block_size
        # (node, the tokens of a block) -> the node after it; 0 is the root. No prefix: nothing is looked up at all.
        self._next: dict[tuple[int, tuple[int, ...]], int] = {}
        for prefix in prefixes:
            node = 0
            for block in self._blocks(prefix):
                node = self._next.setdefault((node, block), len(self._next) + 1)

    def match(self, token_ids: Sequence[int]) -> int:
        """Number of leading tokens in blocks wholly inside a declared prefix: a multiple of the block size."""
        node = num_tokens = 0
        if self._next:
            for block in self._blocks(token_ids):
                following = self._next.get((node, block))
                if following is None:
                    break
                node = following
                num_tokens += self._block_size
        return num_tokens

    def _blocks(self, token_ids: Sequence[int]) -> Iterable[tuple[int, ...]]:
        size = self._block_size
        return (tuple(token_ids[i : i + size]) for i in range(0, len(token_ids) - size + 1, size))
