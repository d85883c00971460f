"""Versions: one content under one name, and the requests bound to it."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...platform.core.errors import ErrorInfo
from ...platform.core.request import Request
from ..adapter import Adapter, AdapterSource

_TOKEN_BYTES = array("q").itemsize
_NEVER = 1 << 62
"""A number above that of any text's tokens."""

Order = tuple[Any, ...]
"""Position in the scheduling policy's order, see `Request.order`: the smallest is the most urgent."""


class Refusal(NamedTuple):
    """Why requests at or below this priority are blocked until the next change."""

    order: Order
    reason: str


class VersionPart(NamedTuple):
    """One adapter of a mix."""

    version: AdapterVersion
    weight: float


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One content under one name. A request is bound to a version while it lives. Opaque outside this package."""

    name: str
    source: AdapterSource
    parts: tuple[VersionPart, ...] = ()
    """Parts of a mix, which has no source of its own."""
    num_mixes: int = 0
    """Number of mixes, current or not, that are made of this version. It is not dropped before them."""
    registered: bool = False
    """True when a user registered it, False when a request brought it. A registered name stays even if its files cannot
    be read."""
    digest: bytes | None = None
    """Digest of the content; None until read."""
    expected: bytes | None = None
    """Digest that its files must have: that of the first read under this registration; None before it."""
    rank: int = 0
    """Largest rank of the base model's modules; 0 until it was read."""
    rows: int = 0
    """Rank rows on the device."""
    bytes_outside_rows: int = 0
    """Bytes of device memory in addition to them."""
    num_bytes: int = 0
    """Bytes of host memory."""
    targets_head: bool = False
    """True when it adapts the model's lm_head or score matrix."""
    targets_experts: bool = False
    """True when it adapts experts of the model."""
    vocab_size: int = 0
    """Number of its tokens; 0: that of the base model."""
    is_plain: bool = True
    """True when it has rank rows and nothing else, for the model and for the drafter, at sites that graphs have."""
    invocation: tuple[int, ...] = ()
    """Invocation tokens from which on it applies; (): it applies to all tokens."""
    has_draft: bool = False
    """True when it has weights for the drafter."""
    draft: str = ""
    """State of the draft weights; see `Adapter.draft`."""
    load_seconds: float = 0.0
    """Duration of the last read of its files."""
    pinned: bool = False
    loading: bool = False
    """True when its files are being read."""
    error: ErrorInfo | None = None
    """Reason why it cannot be loaded; final. Later requests get another version."""
    current: bool = False
    """True when new requests for its name get it."""
    waiting: dict[Request, float] = field(default_factory=dict)
    """Requests to be admitted, preempted ones too, and the time when each was added."""
    running: dict[Request, float] = field(default_factory=dict)
    """Admitted requests, with the same time. Each counts as a user of the device rows."""
    started: set[Request] = field(default_factory=set)
    """Requests of either kind that were ever admitted. They must continue with this content, so it stays in host
    memory."""
    # Waiting requests that are not in a heap yet: new ones have no order before the next step.
    _unordered: list[Request] = field(default_factory=list)
    # Waiting requests by account, since the order of accounts changes, and in each by order. Some may be gone.
    _heaps: dict[Any, list[tuple[Order, int, Request]]] = field(default_factory=dict)

    @property
    def digests(self) -> list[bytes | None]:
        """Digest of its content, or those of a mix's parts."""
        return [part.version.digest for part in self.parts] or [self.digest]

    def take_content(self, adapter: Adapter) -> None:
        """Record the properties of the content that was read."""
        self.digest = self.expected = adapter.digest
        self.rank, self.rows, self.num_bytes = adapter.target.rank, adapter.rows, adapter.num_bytes
        self.bytes_outside_rows = adapter.bytes_outside_rows
        self.targets_head = adapter.targets_head
        self.is_plain = all(part.is_plain for part in adapter.packed) and not adapter.targets_latents
        self.invocation, self.vocab_size = adapter.target.invocation, adapter.target.vocab_size
        self.targets_experts = adapter.targets_experts
        self.has_draft, self.draft = bool(adapter.drafter.rank), adapter.draft
        self.load_seconds = adapter.load_seconds

    def count_base_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of a prompt's tokens before the last invocation of an activated adapter: the base model
        computes these. Without an invocation the base model computes all tokens."""
        if not self.invocation:
            return 0
        tokens, wanted = (array("q", part).tobytes() for part in (prompt, self.invocation))
        at = tokens.rfind(wanted)
        while at % _TOKEN_BYTES and at >= 0:  # no whole tokens
            at = tokens.rfind(wanted, 0, at + len(wanted) - 1)
        return at // _TOKEN_BYTES if at >= 0 else _NEVER

    @property
    def label(self) -> str:
        """Label of its requests in the statistics, as in `LoRAMix.label`."""
        return "+".join(part.version.name for part in self.parts) or self.name

    @property
    def in_use(self) -> bool:
        """True when a request is bound to it."""
        return bool(self.running or self.waiting)

    def bind(self, request: Request, now: float) -> None:
        """Bind a new request, which waits."""
        request.adapter = self
        self.waiting[request] = now
        self._unordered.append(request)

    def start(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        self.running[request] = self.waiting.pop(request)
        self.started.add(request)

    def preempt(self, request: Request) -> None:
        """Move a running request back to the waiting ones, with the time when it was added."""
        self.waiting[request] = self.running.pop(request)
        self._unordered.append(request)

    def unbind(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.waiting.pop(request, None)
        self.running.pop(request, None)
        self.started.discard(request)

    def first_waiting(self) -> Request | None:
        """Return the most urgent waiting request. The requests must have their orders."""
        for request in self._unordered:
            if request in self.waiting:
                heapq.heappush(self._heaps.setdefault(request.order[0], []), (request.order, id(request), request))
        self._unordered.clear()
        first: Request | None = None
        for account, heap in tuple(self._heaps.items()):
            while heap and heap[0][2] not in self.waiting:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[account]
            elif first is None or heap[0][2].order < first.order:
                first = heap[0][2]
        return first

    def check_integrity(self) -> None:
        """Check that its requests agree."""
        assert not self.started or self.digest is not None
        assert not self.running.keys() & self.waiting.keys(), "a request both runs and waits"
        assert self.running.keys() <= self.started <= self.running.keys() | self.waiting.keys()
        assert all(request.adapter is self for request in (*self.running, *self.waiting))
        first = self.first_waiting()
        assert first is None if not self.waiting else first in self.waiting
        assert first is None or first.order == min(request.order for request in self.waiting)
