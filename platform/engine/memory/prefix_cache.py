"""Finds KV blocks that already hold a prefix of a sequence.

A full block is known by the chained hash of (namespace, parent hash, its tokens), so equal hashes mean equal
prefixes in an equal namespace. The namespace is made of the tenant, the salt and the digest of the adapter's
content: nothing is shared across them. BLAKE2b is used because a collision would hand one tenant's keys and values
to another.

The leading blocks that all tenants share (`Request.num_shared_tokens`) are chained from a namespace of the adapter's
content alone. The first block after them is chained from their hash and the tenant's namespace, so the tenant's own
text is as separate as ever:

    shared root (adapter) -> block 0 -> block 1 -+-> tenant a -> block 2 -> ...
                                                 +-> tenant b -> block 2 -> ...
    own root (tenant a, salt, adapter) -> block 0 -> ...

An activated adapter (aLoRA) starts to apply in the middle of a prompt. The blocks before that are the base model's,
in its namespace; the block in which it starts is chained from their hash and the adapter's content.

The kinds of roots are hashed under different personalizations, which no tenant controls: a namespace of one kind cannot
collide with one of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from ...core.batch import Move, RowPlan, StepPlan
from ...core.request import Request
from .block_pool import BlockPool
from .cache_events import DEVICE, CacheEvents
from .host_tier import HostTier
from .state_slots import StateSlots

# Personalizations of the hash.
_BLOCK, _OWN, _SHARED, _AFTER_SHARED = b"block", b"own root", b"shared root", b"after shared"
_ACTIVATED = b"activated"


def _hash(data: bytes, kind: bytes) -> bytes:
    return blake2b(data, digest_size=16, person=kind).digest()


class PrefixMatch(NamedTuple):
    """A cached prefix; the caller owns one reference to each block."""

    blocks: list[int]
    num_tokens: int
    num_draft_tokens: int
    """Leading tokens whose KV is valid in the drafter's layers too."""


class PrefixCache:
    """Maps hashes to blocks of a `BlockPool`. Holds no references: a cached block may be free, and is then lost on
    reuse, or kept by the `host`."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        host: HostTier | None = None,
        *,
        states: StateSlots | None = None,
        keeps_finished: bool = True,
    ) -> None:
        """`states`: slots of recurrent states; None: the model has none. `keeps_finished`: later sequences may find the
        blocks of a finished one; else only its siblings may, and a sequence finds its own after a preemption."""
        self.pool = pool
        self.host = host
        self._states = states
        self.keeps_finished = keeps_finished
        self.block_size = block_size
        self.events: CacheEvents | None = None
        """Records changes of what new sequences can find; None: there is no listener."""
        self.num_queries = 0
        self.num_hits = 0
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._draft_ready: set[int] = set()
        """Blocks, cached or in use, whose KV in the drafter's layers is valid."""
        pool.on_reuse = self._reuse
        pool.keeps = self._hash_of.__contains__

    def record(self, events: CacheEvents) -> None:
        """Record changes in `events` from now on. Nothing is cached yet."""
        assert not self._hash_of
        self.events = events
        if self.host is not None:
            self.host.events = events

    def match(self, request: Request) -> PrefixMatch:
        """Acquire the longest cached prefix of the request's tokens. At least one token is left to compute, for its
        logits."""
        if request.namespace is None or request.params.reads_whole_prompt:
            return PrefixMatch([], 0, 0)
        limit = (len(request.tokens) - 1) // self.block_size
        self._extend_hashes(request, limit)
        blocks: list[int] = []
        for digest in request.block_hashes[:limit]:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        blocks = blocks[: self._num_resumable(request.block_hashes[: len(blocks)])]
        self.pool.acquire(blocks)
        return self._matched(blocks)

    def _num_resumable(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks, of those that are there, from whose end a sequence can continue."""
        return len(hashes) if self._states is None else self._states.num_resumable(hashes)

    def _matched(self, blocks: list[int]) -> PrefixMatch:
        drafted = next((i for i, block in enumerate(blocks) if block not in self._draft_ready), len(blocks))
        return PrefixMatch(blocks, len(blocks) * self.block_size, drafted * self.block_size)

    def start(self, request: Request) -> None:
        """Give a request the blocks of `match`, and count their tokens as computed."""
        self._begin(request, self.match(request))

    def bring_back(self, request: Request) -> None:
        """Add the blocks after `start` that the host has to a request. There is room for the whole request, or nothing
        runs."""
        host = self.host
        if (
            host is None
            or request.namespace is None
            or request.params.reads_whole_prompt
            or not host.cost.is_cheaper_than_recompute()
        ):
            return
        limit, found = (len(request.tokens) - 1) // self.block_size, []
        for digest in request.block_hashes[len(request.blocks) : limit]:
            if digest not in self._block_of and digest not in host:
                break
            found.append(digest)
        num_held = len(request.blocks)
        found = found[: max(0, self._num_resumable(request.block_hashes[: num_held + len(found)]) - num_held)]
        here = [self._block_of[digest] for digest in found if digest in self._block_of]
        self.pool.acquire(here)
        taken = host.take([digest for digest in found if digest not in self._block_of])
        fresh = self.pool.allocate(len(taken))
        host.put_back(taken, fresh or ())
        if fresh is None:
            self.pool.release(here)
            return
        for block, (digest, (_, draft_ready)) in zip(fresh, taken.items(), strict=True):
            self._block_of[digest], self._hash_of[block] = block, digest
            if draft_ready:
                self._draft_ready.add(block)
        if self.events is not None:
            self.events.stored(request, [num_held + index for index, digest in enumerate(found) if digest in taken])
        self._begin(request, self._matched([*request.blocks, *(self._block_of[digest] for digest in found)]))

    def take_back(self, request: Request) -> None:
        """Free a request's blocks: none of its tokens are computed any more."""
        self.pool.release(request.blocks)
        self._begin(request, PrefixMatch([], 0, 0))

    def finish(self, request: Request, *, has_siblings: bool = False) -> None:
        """Free a finished request's blocks, and drop those that no request may find any more; with unfinished siblings
        (`has_siblings`) the prompt's stay."""
        if not self.keeps_finished:
            num_prompt = request.num_prompt_tokens // self.block_size
            if request.group is not None and request.namespace is not None:
                self._extend_hashes(request, num_prompt)  # this one may never have run
            num_kept = num_prompt if has_siblings else 0
            own = set(request.blocks)
            for digest in request.block_hashes[num_kept:]:
                block = self._block_of.get(digest)
                if block is not None and self.pool.num_references(block) <= (block in own):
                    self._forget(block)
                if self.host is not None:
                    self.host.forget(digest)
                if self._states is not None:
                    self._states.snapshots.forget(digest)
        self.take_back(request)

    def _begin(self, request: Request, match: PrefixMatch) -> None:
        request.blocks = array("q", match.blocks)
        request.num_computed_tokens, request.num_draft_computed = match.num_tokens, match.num_draft_tokens
        request.num_published = len(match.blocks)
        request.num_draft_published = match.num_draft_tokens // self.block_size
        if self._states is not None:
            self._states.begin(request, match.num_tokens)

    def count(self, request: Request, num_found: int) -> None:
        """Record for the statistics that a request started with `num_found` cached tokens."""
        if request.namespace is not None:
            self.num_queries += len(request.tokens)
            self.num_hits += num_found

    def plan(self, rows: Sequence[RowPlan]) -> None:
        """Plan what the rows of a step read and write in addition to KV blocks."""
        if self._states is not None:
            self._states.plan(rows)

    def commit(self, row: RowPlan) -> None:
        """Offer what a committed row of a running sequence has computed."""
        self.publish(row.request)
        if self._states is not None:
            self._states.commit(row)

    @property
    def outlives_failures(self) -> bool:
        """False if the content of running sequences may be wrong after a step that failed."""
        return self.host is None and self._states is None

    def publish(self, request: Request) -> None:
        """Publish the request's full, accepted blocks. If another block already holds the same prefix, that one
        stays."""
        if request.namespace is None or (
            request.num_computed_tokens < (request.num_published + 1) * self.block_size
            and request.num_draft_computed < (request.num_draft_published + 1) * self.block_size
        ):
            return
        full = min(request.num_computed_tokens, len(request.tokens)) // self.block_size
        if full > request.num_published:
            self._extend_hashes(request, full)
            fresh = [i for i in range(request.num_published, full) if request.block_hashes[i] not in self._block_of]
            for index in fresh:
                digest, block = request.block_hashes[index], request.blocks[index]
                self._block_of[digest], self._hash_of[block] = block, digest
            if self.events is not None:
                self.events.stored(request, fresh)
            request.num_published = full
        drafted = min(request.num_draft_computed // self.block_size, full)
        if drafted > request.num_draft_published:
            self._draft_ready.update(request.blocks[request.num_draft_published : drafted])
            request.num_draft_published = drafted

    def moves(self) -> Sequence[Move]:
        """Copies between device and host to make before the next step computes."""
        return self.host.moves() if self.host is not None else ()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Observe the time of a step."""
        if self.host is not None:
            self.host.cost.observe(plan, seconds)

    def reset(self, *, with_used: bool = False) -> bool:
        """Drop all blocks that no sequence uses, or `with_used` all blocks, and all of the host's; True when the cache
        is empty."""
        for block in [block for block in self._hash_of if with_used or self.pool.is_free(block)]:
            self._forget(block)
        if self.host is not None:
            self.host.reset()
        if self._states is not None:
            self._states.snapshots.reset()
        if self.events is not None and not self._hash_of:
            self.events.cleared()
        return not self._hash_of

    def _extend_hashes(self, request: Request, count: int) -> None:
        hashes = request.block_hashes
        assert request.namespace is not None
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            tokens = array("q", request.tokens[start : start + self.block_size]).tobytes()
            hashes.append(_hash(self._parent(request, len(hashes)) + tokens, _BLOCK))

    def _parent(self, request: Request, index: int) -> bytes:
        """Parent hash of a request's block `index`."""
        if request.activation and index == request.num_base_tokens // self.block_size:
            return _hash(self._parent_in_namespace(request, index) + request.activation, _ACTIVATED)
        return self._parent_in_namespace(request, index)

    def _parent_in_namespace(self, request: Request, index: int) -> bytes:
        assert request.namespace is not None
        num_shared = request.num_shared_tokens // self.block_size
        if index == 0:
            return _hash(request.shared_namespace, _SHARED) if num_shared else _hash(request.namespace, _OWN)
        parent = request.block_hashes[index - 1]
        return _hash(parent + request.namespace, _AFTER_SHARED) if index == num_shared else parent

    def _reuse(self, block: int) -> None:
        """Remove a block that is handed out again; the host may keep its content."""
        if self.host is not None and block in self._hash_of:
            self.host.keep(self._hash_of[block], block, draft_ready=block in self._draft_ready)
        self._forget(block)

    def _forget(self, block: int) -> None:
        self._draft_ready.discard(block)
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            if self.events is not None:
                self.events.removed(digest, DEVICE)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two maps mirror each other, and the host's slots are all accounted for."""
        if self.host is not None:
            self.host.check_integrity()
        if self._states is not None:
            self._states.check_integrity()
        assert {digest: block for block, digest in self._hash_of.items()} == self._block_of
