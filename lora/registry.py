"""Names and versions. A name stands for one current version; older ones live on while requests run on them.

    newcomer --read--> current --replaced, unloaded--> draining --no requests--> gone

What a request names under a name that is taken is a newcomer: it takes the name when its files have been read. One that
cannot be read takes nothing from anybody.
"""

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
    rank: int = 0
    """Largest rank of the base model's modules; 0 until the first parse."""
    rows: int = 0
    """Rank rows, for the drafter's modules too."""
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
    current: bool = False
    """Whether its name means it."""
    waiting: dict[Request, float] = field(default_factory=dict)
    """Requests to be admitted, preempted ones too, and since when: from when they were added."""
    running: dict[Request, float] = field(default_factory=dict)
    """Admitted requests, with the same time; each counts as a user of the device rows."""
    started: set[Request] = field(default_factory=set)
    """Those of either that were ever admitted: they must go on with this content, which stays in host memory."""
    _first: Request | None = None

    def take_content(self, adapter: Adapter) -> None:
        """Remember what was parsed."""
        self.digest, self.fingerprint = adapter.digest, adapter.fingerprint
        self.rank, self.rows = adapter.rank, adapter.rows
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
    """The current version of every name, its newcomer, and the older ones that still have requests."""

    def __init__(self) -> None:
        self._current: dict[str, AdapterVersion] = {}
        self._newcomers: dict[str, AdapterVersion] = {}
        self._draining: list[AdapterVersion] = []

    def __iter__(self) -> Iterator[AdapterVersion]:
        """All versions, newcomers and those being drained too."""
        yield from self._current.values()
        yield from self._newcomers.values()
        yield from self._draining

    def current(self) -> list[AdapterVersion]:
        """The version of each name, in the order of registration."""
        return list(self._current.values())

    def find(self, name: str) -> AdapterVersion | None:
        """The current version of a name."""
        return self._current.get(name)

    def match(self, name: str, source: AdapterSource) -> AdapterVersion | None:
        """The version of a name that a request for `source` means: the current one before the newcomer."""
        versions = (self._current.get(name), self._newcomers.get(name))
        return next((v for v in versions if v is not None and v.source.matches(source)), None)

    def register(self, name: str, source: AdapterSource) -> AdapterVersion:
        """Make a new version the current one, of a content that has been read; requests on an earlier one stay
        there."""
        self._drop_newcomer(name)
        return self._replace(AdapterVersion(name, source))

    def introduce(self, name: str, source: AdapterSource) -> AdapterVersion:
        """A new version whose files nobody has read yet: the current one where the name is free, else its newcomer."""
        self._drop_newcomer(name)
        version = AdapterVersion(name, source)
        if name not in self._current:
            return self._replace(version)
        self._newcomers[name] = version
        return version

    def renew(self, stale: AdapterVersion) -> AdapterVersion:
        """A new version for the same files, to be read again by later requests. Pinned ones are never out of memory."""
        assert not stale.pinned
        return self._replace(AdapterVersion(stale.name, stale.source))

    def succeed(self, version: AdapterVersion) -> None:
        """Its files have been read: a newcomer takes its name."""
        if self._newcomers.get(version.name) is version:
            self._replace(self._newcomers.pop(version.name))

    def fail(self, version: AdapterVersion) -> None:
        """Its files cannot be read: later requests for them get another version. A newcomer leaves the current one
        as it was."""
        name = version.name
        if self._newcomers.get(name) is version:
            self._drop_newcomer(name)
        elif not version.current:
            return
        elif version.digest is not None:
            self.renew(version)
        else:  # it never was an adapter
            self._retire(self._current.pop(name))
            if name in self._newcomers:
                self._replace(self._newcomers.pop(name))

    def remove(self, name: str) -> None:
        """Forget a name; raises NotFoundError when it is unknown."""
        version = self._current.pop(name, None)
        if version is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._drop_newcomer(name)
        self._retire(version)

    def _replace(self, version: AdapterVersion) -> AdapterVersion:
        previous = self._current.get(version.name)
        self._current[version.name] = version
        version.current = True
        if previous is not None:
            self._retire(previous)
        return version

    def _drop_newcomer(self, name: str) -> None:
        if name in self._newcomers:
            self._retire(self._newcomers.pop(name))

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
        for name, version in self._newcomers.items():
            assert version.name == name
            assert name in self._current, "a newcomer waits for a name that is free"
            assert version.digest is None
            assert version.error is None
        for version in self:
            assert version.current == (self._current.get(version.name) is version)
            assert not version.started or version.digest is not None
            assert not version.running.keys() & version.waiting.keys(), "a request both runs and waits"
            assert version.running.keys() <= version.started <= version.running.keys() | version.waiting.keys()
            assert all(request.adapter is version for request in (*version.running, *version.waiting))
            assert version.first_waiting() is None or version.first_waiting() in version.waiting
