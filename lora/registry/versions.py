"""One content under one name, and the requests that are bound to it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...platform.core.errors import ErrorInfo
from ...platform.core.request import Request
from ..adapter import AdapterSource
from ..files.tensor_keys import LM_HEAD
from ..tiers.row_writer import HostEntry

Order = tuple[Any, ...]
"""A request's place in the scheduling policy's order, see `Request.order`: the smallest is the most urgent."""


class Refusal(NamedTuple):
    """Why requests of a version as urgent as `order`, or less, must wait until something changes."""

    order: Order
    reason: str


class VersionPart(NamedTuple):
    """One adapter of a mix."""

    version: AdapterVersion
    weight: float


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """Binding of a request from when it is added. Opaque outside this package."""

    name: str
    source: AdapterSource
    parts: tuple[VersionPart, ...] = ()
    """Parts of a mix, which has no source of its own."""
    num_mixes: int = 0
    """Mixes, current or not, that are made of this version: it is not forgotten before them."""
    registered: bool = False
    """True when somebody registered it, rather than a request brought it: its name stays when it cannot be read."""
    digest: bytes | None = None
    """None until the first parse."""
    expected: bytes | None = None
    """Digest that its files must have: of what was read before under this registration. None: nothing was."""
    rank: int = 0
    """Largest rank of the base model's modules; 0 until the first parse."""
    rows: int = 0
    """Rank rows, for the drafter's modules too."""
    num_bytes: int = 0
    """Bytes of its content in host memory."""
    targets_head: bool = False
    """True when it adapts the model's lm_head."""
    has_gains: bool = False
    """True when it scales the model's base weights (DoRA)."""
    has_draft: bool = False
    """True when it brings weights for the drafter."""
    draft: str = ""
    """Reason why it brings none; see `Adapter.draft`."""
    load_seconds: float = 0.0
    """How long the last read of its files took."""
    pinned: bool = False
    loading: bool = False
    """True when its files are being read."""
    error: ErrorInfo | None = None
    """Why it cannot be loaded; final. Later requests get another version."""
    current: bool = False
    """True when its name means it."""
    waiting: dict[Request, float] = field(default_factory=dict)
    """Requests to be admitted, preempted ones too, and since when: from when they were added."""
    running: dict[Request, float] = field(default_factory=dict)
    """Admitted requests, with the same time; each counts as a user of the device rows."""
    started: set[Request] = field(default_factory=set)
    """Requests of either that were ever admitted: they must go on with this content, which stays in host memory."""
    _unordered: list[Request] = field(default_factory=list)  # waiting, not in the heap: new ones have no order yet
    # By account, as accounts change places, and in each by order; some have gone meanwhile.
    _heaps: dict[Any, list[tuple[Order, int, Request]]] = field(default_factory=dict)

    def take_content(self, entry: HostEntry) -> None:
        """Remember what was read, and the memory that it takes."""
        adapter, target = entry.adapter, entry.packed[0]
        self.digest = self.expected = adapter.digest
        self.rank, self.rows, self.num_bytes = target.rank, adapter.rows, entry.num_bytes
        self.targets_head, self.has_draft = LM_HEAD in adapter.modules, bool(adapter.draft_modules)
        self.has_gains = bool(target.gains)
        self.draft = adapter.draft

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.source.path

    @property
    def label(self) -> str:
        """Label that its requests are counted under, as in `LoRAMix.label`."""
        return "+".join(part.version.name for part in self.parts) or self.name

    @property
    def in_use(self) -> bool:
        """Return whether any request is bound to it."""
        return bool(self.running or self.waiting)

    def bind(self, request: Request, now: float) -> None:
        """A new request waits."""
        request.adapter = self
        self.waiting[request] = now
        self._unordered.append(request)

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.running[request] = self.waiting.pop(request)
        self.started.add(request)

    def preempt(self, request: Request) -> None:
        """A running request waits again, as long as it ever did."""
        self.waiting[request] = self.running.pop(request)
        self._unordered.append(request)

    def unbind(self, request: Request) -> None:
        """The request is gone for good."""
        self.waiting.pop(request, None)
        self.running.pop(request, None)
        self.started.discard(request)

    def first_waiting(self) -> Request | None:
        """The most urgent request that waits. Asked only once the requests have their orders."""
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
        """Its requests agree."""
        assert not self.started or self.digest is not None
        assert not self.running.keys() & self.waiting.keys(), "a request both runs and waits"
        assert self.running.keys() <= self.started <= self.running.keys() | self.waiting.keys()
        assert all(request.adapter is self for request in (*self.running, *self.waiting))
        first = self.first_waiting()
        assert first is None if not self.waiting else first in self.waiting
        assert first is None or first.order == min(request.order for request in self.waiting)
