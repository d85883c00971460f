"""Names and versions. A name stands for one current version; older ones live on while requests run on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..platform.core.errors import ErrorInfo, NotFoundError
from ..platform.core.request import Request, Status
from .adapter import Adapter, Fingerprint


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One content under one name: what a request is bound to from when it is added. Opaque outside this package."""

    name: str
    path: str
    digest: bytes | None = None
    """None until the first parse."""
    rows: int = 0
    """Rank rows; 0 until the first parse."""
    fingerprint: Fingerprint = ()
    """Of the files that were parsed."""
    pinned: bool = False
    loading: bool = False
    """Whether the loader thread has it."""
    error: ErrorInfo | None = None
    """Why it cannot be loaded; final. Later requests get another version."""
    current: bool = True
    """False once its name means something else, or nothing."""
    waiting: dict[Request, float] = field(default_factory=dict)
    """Requests to be admitted and when they began to wait, in that order."""
    running: set[Request] = field(default_factory=set)
    """Admitted requests; each counts as a user of the device rows."""

    def take_content(self, adapter: Adapter) -> None:
        """Remember what was parsed."""
        self.digest, self.rows, self.fingerprint = adapter.digest, adapter.rows, adapter.fingerprint

    def waiting_since(self) -> float | None:
        """Since when a request has been waiting for this version; None when none is."""
        while self.waiting:
            request, since = next(iter(self.waiting.items()))
            if request.status is not Status.FINISHED:
                return since
            del self.waiting[request]  # it ended without a word
        return None


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

    def register(self, name: str, path: str) -> AdapterVersion:
        """Make a new version the current one; requests on an earlier one stay there."""
        return self._replace(AdapterVersion(name, os.path.abspath(path)))

    def renew(self, broken: AdapterVersion) -> AdapterVersion:
        """A new version for the same files, to be read again by later requests."""
        return self._replace(AdapterVersion(broken.name, broken.path, pinned=broken.pinned))

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
        done = [v for v in self._draining if not (v.running or v.loading) and v.waiting_since() is None]
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
            assert not version.running or version.digest is not None
            assert not version.running.intersection(version.waiting), "a request both runs and waits"
            for request in version.running:
                assert request.adapter is version
        assert not any(version.current for version in self._draining)
