"""Names and versions. A name has one current version; older versions live on while requests are bound to them.

    candidate --read--> current --replaced, unloaded--> draining --no requests--> gone

A request may name other folders under a name that is taken. Their version is a candidate: it becomes current when its
files have been read. If they cannot be read, the current version stays.

Thousands of names only cost memory: a step and a request visit only versions in use.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from ...platform.core.errors import NotFoundError, OutriderError
from ...platform.core.request import Request
from ..adapter import Adapter, AdapterSource
from .versions import AdapterVersion, Order, VersionPart


class AdapterRegistry:
    """Current versions and candidates by name, mixes of them, and older versions that still have requests."""

    def __init__(self) -> None:
        self._current: dict[str, AdapterVersion] = {}
        self._candidates: dict[str, AdapterVersion] = {}
        self._mixes: dict[tuple[VersionPart, ...], AdapterVersion] = {}  # by their parts
        self._draining: dict[AdapterVersion, None] = {}
        self._contents: dict[bytes, dict[AdapterVersion, None]] = {}  # versions by digest
        self._in_use: dict[AdapterVersion, None] = {}
        self._pinned: dict[AdapterVersion, None] = {}
        self.num_failures = 0
        """Loads that failed."""

    def __iter__(self) -> Iterator[AdapterVersion]:
        """Iterate over all versions, also candidates and draining ones: thousands."""
        yield from self._current.values()
        yield from self._candidates.values()
        yield from self._mixes.values()
        yield from self._draining

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._current)

    def current(self) -> list[AdapterVersion]:
        """Return the current version of each name, in the order of registration."""
        return list(self._current.values())

    def in_use(self) -> Iterable[AdapterVersion]:
        """Return the versions with requests, as a live view."""
        return self._in_use.keys()

    def pinned(self) -> Iterable[AdapterVersion]:
        """Return the current versions that are pinned, as a live view."""
        return self._pinned.keys()

    def with_content(self, digest: bytes) -> Iterable[AdapterVersion]:
        """Return the versions, current or not, with this content, as a live view."""
        return self._contents.get(digest, {}).keys()

    def find(self, name: str) -> AdapterVersion | None:
        """Return the current version of a name; None when the name is unknown."""
        return self._current.get(name)

    def get(self, name: str) -> AdapterVersion:
        """Return the current version of a name; NotFoundError when the name is unknown."""
        version = self._current.get(name)
        if version is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        return version

    def match(self, name: str, source: AdapterSource) -> AdapterVersion | None:
        """Return the version of a name that a request for `source` means: the current one before the candidate."""
        versions = (self._current.get(name), self._candidates.get(name))
        return next((v for v in versions if v is not None and v.source.matches(source)), None)

    # --- names ---

    def register(self, version: AdapterVersion) -> None:
        """Make a new version the current one. Its content has been read; if the name is free, it may also be read
        later. Requests on an earlier version stay there."""
        self._drop_candidate(version.name)
        version.registered = True
        self._replace(version)

    def add_candidate(self, name: str, source: AdapterSource) -> AdapterVersion:
        """Add a version that a request brings and whose files have not been read. It is the current one if the name is
        free, else the candidate."""
        self._drop_candidate(name)
        version = AdapterVersion(name, source)
        if name not in self._current:
            return self._replace(version)
        self._candidates[name] = version
        return version

    def _renew(self, stale: AdapterVersion) -> AdapterVersion:
        """Replace a version by a new one for the same content, which later requests read again."""
        assert not stale.pinned, "pinned ones are never out of memory"
        version = AdapterVersion(stale.name, stale.source)
        version.registered, version.expected = stale.registered, stale.expected
        return self._replace(version)

    def promote(self, version: AdapterVersion) -> None:
        """Make a candidate whose files have been read current; no effect on other versions."""
        if self._candidates.get(version.name) is version:
            self._replace(self._candidates.pop(version.name))

    def fail(self, version: AdapterVersion, error: OutriderError) -> None:
        """Pass the error to the requests that wait for a version. Later requests get another version; the current one
        stays when this is a candidate."""
        version.error = error.info()
        self.num_failures += 1
        name = version.name
        if version.parts:
            self._retire_mix(version)
        elif self._candidates.get(name) is version:
            self._drop_candidate(name)
        elif not version.current:
            return
        elif version.registered or version.expected is not None:
            self.set_pinned(version, False)
            self._renew(version)
        else:  # it never was an adapter
            self._retire(self._current.pop(name))
            if name in self._candidates:
                self._replace(self._candidates.pop(name))

    def remove(self, name: str) -> None:
        """Remove a name; NotFoundError if it is unknown."""
        version = self.get(name)
        del self._current[name]
        self._drop_candidate(name)
        self._retire(version)

    def _replace(self, version: AdapterVersion) -> AdapterVersion:
        previous = self._current.get(version.name)
        self._current[version.name] = version
        version.current = True
        if previous is not None:
            self._retire(previous)
        return version

    def _drop_candidate(self, name: str) -> None:
        if name in self._candidates:
            self._retire(self._candidates.pop(name))

    def _retire(self, version: AdapterVersion) -> None:
        version.current = False
        self._pinned.pop(version, None)
        self._draining[version] = None
        if version.num_mixes:
            for mix in [mix for mix in self._mixes.values() if any(part.version is version for part in mix.parts)]:
                self._retire_mix(mix)

    # --- mixes ---

    def find_mix(self, parts: tuple[VersionPart, ...]) -> AdapterVersion | None:
        """Return the version of a mix of these versions."""
        return self._mixes.get(parts)

    def mix(self, name: str, parts: tuple[VersionPart, ...]) -> AdapterVersion:
        """Return the version of a mix of these versions, a new one if needed.

        It is dropped when a part is replaced or unloaded, and when it is neither in memory nor in use, since requests
        may name any number of mixes.
        """
        version = self._mixes.get(parts)
        if version is None:
            version = self._mixes[parts] = AdapterVersion(name, AdapterSource(""), parts)
            for part in parts:
                part.version.num_mixes += 1
        return version

    def _retire_mix(self, mix: AdapterVersion) -> None:
        if self._mixes.get(mix.parts) is mix:
            del self._mixes[mix.parts]
            self._draining[mix] = None

    def set_pinned(self, version: AdapterVersion, pinned: bool) -> None:
        """Keep a current version on the device, or stop doing so."""
        assert version.current
        version.pinned = pinned
        if pinned:
            self._pinned[version] = None
        else:
            self._pinned.pop(version, None)

    # --- requests and contents ---

    def bind(self, request: Request, version: AdapterVersion, now: float) -> None:
        """Bind a new request to a version."""
        version.bind(request, now)
        self._in_use[version] = None

    def unbind(self, request: Request, version: AdapterVersion) -> None:
        """Remove a request that has ended."""
        version.unbind(request)
        if not version.in_use:
            self._in_use.pop(version, None)

    def requests_of(self, name: str) -> list[Request]:
        """Return the requests that run or wait under a name, on any of its versions or on a mix with one."""
        versions = [v for v in self._in_use if name in ([part.version.name for part in v.parts] or [v.name])]
        return [request for version in versions for request in (*version.running, *version.waiting)]

    def take_content(self, version: AdapterVersion, adapter: Adapter) -> None:
        """Record the content that was read for a version."""
        version.take_content(adapter)
        self._contents.setdefault(adapter.digest, {})[version] = None

    def first_order(self, digest: bytes) -> Order | None:
        """Return the order of the most urgent request that waits for a content; None when no request does."""
        firsts = [version.first_waiting() for version in self.with_content(digest)]
        return min((first.order for first in firsts if first is not None), default=None)

    def is_held(self, digest: bytes) -> bool:
        """True if a preempted request waits to continue with the content, which must then stay in host memory."""
        return any(len(version.started) > len(version.running) for version in self.with_content(digest))

    def collect(self, resident: Container[object]) -> list[bytes]:
        """Drop draining versions without requests and loads, and such mixes whose content is not `resident`.

        Returns:
            The digests of contents that no version has any more.
        """
        for mix in list(self._mixes.values()):
            if not (mix.in_use or mix.loading or mix.digest in resident):
                self._retire_mix(mix)
        gone: list[bytes] = []
        while done := [v for v in self._draining if not (v.in_use or v.loading or v.num_mixes)]:
            for version in done:
                del self._draining[version]
                for part in version.parts:
                    part.version.num_mixes -= 1
                gone += self._forget_content(version)
        return gone

    def _forget_content(self, version: AdapterVersion) -> list[bytes]:
        """Drop a version's content; returns its digest if no other version has it."""
        if version.digest is None:
            return []
        versions = self._contents[version.digest]
        del versions[version]
        if versions:
            return []
        del self._contents[version.digest]
        return [version.digest]

    def check_integrity(self) -> None:
        """Check that names, versions and their requests agree."""
        for name, version in self._current.items():
            assert version.name == name
            assert version.current
            assert version.error is None, "a broken version is still current"
        for name, version in self._candidates.items():
            assert version.name == name
            assert name in self._current, "a candidate waits for a name that is free"
            assert version.digest is None
            assert version.error is None
        everyone = set(self)
        assert set(self._in_use) == {version for version in everyone if version.in_use}
        assert set(self._pinned) == {version for version in everyone if version.pinned and version.current}
        contents: dict[bytes, set[AdapterVersion]] = {}
        for version in everyone:
            if version.digest is not None:
                contents.setdefault(version.digest, set()).add(version)
        assert contents == {digest: set(versions) for digest, versions in self._contents.items()}
        for parts, version in self._mixes.items():
            assert version.parts == parts
            assert version.error is None, "a broken mix is still there for new requests"
            assert all(part.version.current or part.version in self._candidates.values() for part in parts)
        made = [part.version for version in everyone for part in version.parts]
        for version in everyone:
            assert version.num_mixes == made.count(version)
            assert version.current == (self._current.get(version.name) is version)
            version.check_integrity()
