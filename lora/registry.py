"""Names and versions. A name stands for one current version; older ones live on while requests run on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..platform.core.errors import ErrorInfo, NotFoundError
from ..platform.core.request import Request
from .adapter import LM_HEAD, Adapter, AdapterSource, Fingerprint

Order = tuple[float, float]
"""A request's place in the scheduling policy's order: the smallest is the most urgent."""


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One content under one name: what a request is bound to from when it is added. Opaque outside this package."""

    name: str
    source: AdapterSource
    digest: bytes | None = None
    """None until the first parse."""
    rows: int = 0
    """Rank rows; 0 until the first parse."""
    fingerprint: Fingerprint = ()
    """Of the files that were parsed."""
    targets_head: bool = False
    """Whether it adapts the model's lm_head."""
    has_draft: bool = False
    """Whether it brings weights for the drafter..."""
    draft: str = ""
    """...and why not; see `Adapter.draft`."""
    pinned: bool = False
    loading: bool = False
    """Whether the loader thread has it."""
    error: ErrorInfo | None = None
    """Why it cannot be loaded; final. Later requests get another version."""
    current: bool = True
    """False once its name means something else, or nothing."""
    waiting: dict[Request, float] = field(default_factory=dict)
    """Requests to be admitted, preempted ones too, and since when: from when they were added."""
    running: dict[Request, float] = field(default_factory=dict)
    """Admitted requests, with the same time; each counts as a user of the device rows."""
    started: set[Request] = field(default_factory=set)
    """Those of either that were ever admitted: they must go on with this content, which stays in host memory."""
    _first: Request | None = None

    def take_content(self, adapter: Adapter) -> None:
        """Remember what was parsed."""
        self.digest, self.rows, self.fingerprint = adapter.digest, adapter.rows, adapter.fingerprint
        self.targets_head, self.has_draft = LM_HEAD in adapter.modules, bool(adapter.draft_modules)
        self.draft = adapter.draft

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.source.path

    def bind(self, request: Request, now: float) -> None:
        """A new request waits."""
        request.adapter = self
        self.waiting[request] = now
        self._first = None  # its order is not known yet

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.running[request] = self.waiting.pop(request)
        self.started.add(request)
        self._first = None if request is self._first else self._first

    def preempt(self, request: Request) -> None:
        """A running request waits again, as long as it ever did."""
        self.waiting[request] = self.running.pop(request)
        self._first = None

    def unbind(self, request: Request) -> None:
        """The request is gone for good."""
        self.waiting.pop(request, None)
        self.running.pop(request, None)
        self.started.discard(request)
        self._first = None if request is self._first else self._first

    def first_waiting(self) -> Request | None:
        """The most urgent request that waits."""
        if self._first is None and self.waiting:
            self._first = min(self.waiting, key=_order)
        return self._first


def _order(request: Request) -> Order:
    return request.order


class AdapterRegistry:
    """The current version of every name, and the older ones that still have requests."""

    def __init__(self) -> None:
        self._current: dict[str, AdapterVersion] = {}
        self._draining: list[AdapterVersion] = []

    def __iter__(self) -> Iterator[AdapterVersion]:
        """All versions, those being drained too."""
        yield from self._current.values()
        yield from self._draining

    def current(self) -> list[AdapterVersion]:
        """The version of each name, in the order of registration."""
        return list(self._current.values())

    def find(self, name: str) -> AdapterVersion | None:
        """The current version of a name."""
        return self._current.get(name)

    def register(self, name: str, source: AdapterSource) -> AdapterVersion:
        """Make a new version the current one; requests on an earlier one stay there."""
        return self._replace(AdapterVersion(name, source))

    def renew(self, stale: AdapterVersion) -> AdapterVersion:
        """A new version for the same files, to be read again by later requests. Pinned ones are never out of memory."""
        assert not stale.pinned
        return self._replace(AdapterVersion(stale.name, stale.source))

    def _replace(self, version: AdapterVersion) -> AdapterVersion:
        previous = self._current.get(version.name)
        self._current[version.name] = version
        if previous is not None:
            self._retire(previous)
        return version

    def remove(self, name: str) -> AdapterVersion:
        """Forget a name; raises NotFoundError when it is unknown."""
        version = self._current.pop(name, None)
        if version is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._retire(version)
        return version

    def _retire(self, version: AdapterVersion) -> None:
        version.current = False
        self._draining.append(version)

    def collect(self) -> list[AdapterVersion]:
        """Forget drained versions that no request uses and no load is under way for, and return them."""
        done = [v for v in self._draining if not (v.running or v.loading or v.waiting)]
        if done:
            self._draining = [v for v in self._draining if v not in done]
        return done

    def has_digest(self, digest: bytes) -> bool:
        """Whether any version, current or draining, has this content."""
        return any(version.digest == digest for version in self)

    def check_integrity(self) -> None:
        """Names, versions and their requests agree."""
        for name, version in self._current.items():
            assert version.name == name
            assert version.current
            assert version.error is None, "a broken version is still current"
        for version in self:
            assert not version.started or version.digest is not None
            assert not version.running.keys() & version.waiting.keys(), "a request both runs and waits"
            assert version.running.keys() <= version.started <= version.running.keys() | version.waiting.keys()
            assert all(request.adapter is version for request in (*version.running, *version.waiting))
            assert version.first_waiting() is None or version.first_waiting() in version.waiting
        assert not any(version.current for version in self._draining)
