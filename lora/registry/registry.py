"""Names and versions. A name stands for one current version; older ones live on while requests run on them.

    newcomer --read--> current --replaced, unloaded--> draining --no requests--> gone

What a request names under a name that is taken is a newcomer: it takes the name when its files have been read. One that
cannot be read takes nothing from anybody.

Thousands of names cost memory and nothing else: what is done for a step or for a request looks at the versions in use.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from ...platform.core.errors import NotFoundError
from ...platform.core.request import Request
from ..adapter import AdapterSource
from ..tiers.row_writer import HostEntry
from .versions import AdapterVersion, Order, VersionPart


class AdapterRegistry:
    """The current version of every name, its newcomer, the mixes of these, and older ones that still have requests."""

    def __init__(self) -> None:
        self._current: dict[str, AdapterVersion] = {}
        self._newcomers: dict[str, AdapterVersion] = {}
        self._mixes: dict[tuple[VersionPart, ...], AdapterVersion] = {}  # by what they are made of
        self._draining: dict[AdapterVersion, None] = {}
        self._contents: dict[bytes, dict[AdapterVersion, None]] = {}  # versions of each content that was read
        self._in_use: dict[AdapterVersion, None] = {}
        self._pinned: dict[AdapterVersion, None] = {}
        self.num_failures = 0
        """Loads that brought no adapter."""

    def __iter__(self) -> Iterator[AdapterVersion]:
        """All versions, newcomers and those being drained too: thousands."""
        yield from self._current.values()
        yield from self._newcomers.values()
        yield from self._mixes.values()
        yield from self._draining

    def __len__(self) -> int:
        """Names."""
        return len(self._current)

    def current(self) -> list[AdapterVersion]:
        """The version of each name, in the order of registration."""
        return list(self._current.values())

    def in_use(self) -> Iterable[AdapterVersion]:
        """Versions with requests. Not to be kept."""
        return self._in_use.keys()

    def pinned(self) -> Iterable[AdapterVersion]:
        """Current versions that are pinned. Not to be kept."""
        return self._pinned.keys()

    def with_content(self, digest: bytes) -> Iterable[AdapterVersion]:
        """Versions, current or not, with this content. Not to be kept."""
        return self._contents.get(digest, {}).keys()

    def find(self, name: str) -> AdapterVersion | None:
        """The current version of a name."""
        return self._current.get(name)

    def get(self, name: str) -> AdapterVersion:
        """Find it; NotFoundError when the name is unknown."""
        version = self._current.get(name)
        if version is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        return version

    def match(self, name: str, source: AdapterSource) -> AdapterVersion | None:
        """The version of a name that a request for `source` means: the current one before the newcomer."""
        versions = (self._current.get(name), self._newcomers.get(name))
        return next((v for v in versions if v is not None and v.source.matches(source)), None)

    # --- names ---

    def register(self, name: str, source: AdapterSource) -> AdapterVersion:
        """Make a new version the current one, of a content that has been read or, where the name is free, will be when
        it is needed; requests on an earlier one stay there."""
        self._drop_newcomer(name)
        version = AdapterVersion(name, source)
        version.registered = True
        return self._replace(version)

    def introduce(self, name: str, source: AdapterSource) -> AdapterVersion:
        """A new version that a request brings, whose files nobody has read yet: the current one where the name is free,
        else its newcomer."""
        self._drop_newcomer(name)
        version = AdapterVersion(name, source)
        if name not in self._current:
            return self._replace(version)
        self._newcomers[name] = version
        return version

    def renew(self, stale: AdapterVersion) -> AdapterVersion:
        """A new version for the same content, to be read again by later requests. Pinned ones are never out of
        memory."""
        assert not stale.pinned
        version = AdapterVersion(stale.name, stale.source)
        version.registered, version.expected = stale.registered, stale.expected
        return self._replace(version)

    def succeed(self, version: AdapterVersion) -> None:
        """Its files have been read: a newcomer takes its name."""
        if self._newcomers.get(version.name) is version:
            self._replace(self._newcomers.pop(version.name))

    def fail(self, version: AdapterVersion) -> None:
        """It cannot be loaded: later requests for it get another version. A newcomer leaves the current one as it
        was."""
        self.num_failures += 1
        name = version.name
        if version.parts:
            self._retire_mix(version)
        elif self._newcomers.get(name) is version:
            self._drop_newcomer(name)
        elif not version.current:
            return
        elif version.registered or version.expected is not None:
            self.set_pinned(version, False)
            self.renew(version)
        else:  # it never was an adapter
            self._retire(self._current.pop(name))
            if name in self._newcomers:
                self._replace(self._newcomers.pop(name))

    def remove(self, name: str) -> None:
        """Forget a name; raises NotFoundError when it is unknown."""
        version = self.get(name)
        del self._current[name]
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
        self._pinned.pop(version, None)
        self._draining[version] = None
        if version.num_mixes:
            for mix in [mix for mix in self._mixes.values() if any(part.version is version for part in mix.parts)]:
                self._retire_mix(mix)

    # --- mixes ---

    def find_mix(self, parts: tuple[VersionPart, ...]) -> AdapterVersion | None:
        """The version of a mix of these versions."""
        return self._mixes.get(parts)

    def mix(self, name: str, parts: tuple[VersionPart, ...]) -> AdapterVersion:
        """The version of a mix of versions that new requests get, a new one if need be. It goes when a part is replaced
        or unloaded, and when it is in no memory and no request has it: any weights may be asked for."""
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
        """Return whether a current version is to stay on the device."""
        assert version.current
        version.pinned = pinned
        if pinned:
            self._pinned[version] = None
        else:
            self._pinned.pop(version, None)

    # --- requests and contents ---

    def bind(self, request: Request, version: AdapterVersion, now: float) -> None:
        """A new request waits for a version."""
        version.bind(request, now)
        self._in_use[version] = None

    def unbind(self, request: Request, version: AdapterVersion) -> None:
        """The request is gone for good."""
        version.unbind(request)
        if not version.in_use:
            self._in_use.pop(version, None)

    def requests_of(self, name: str) -> list[Request]:
        """All that run or wait under a name, on any of its versions or on a mix with one."""
        versions = [v for v in self._in_use if name in ([part.version.name for part in v.parts] or [v.name])]
        return [request for version in versions for request in (*version.running, *version.waiting)]

    def take_content(self, version: AdapterVersion, entry: HostEntry) -> None:
        """Remember what was read."""
        version.take_content(entry)
        self._contents.setdefault(entry.adapter.digest, {})[version] = None

    def has_digest(self, digest: bytes) -> bool:
        """Return whether any version, current or draining, has this content."""
        return digest in self._contents

    def claim(self, digest: bytes) -> Order | None:
        """The order of the most urgent request that waits for a content; None when nobody does."""
        firsts = [version.first_waiting() for version in self.with_content(digest)]
        return min((first.order for first in firsts if first is not None), default=None)

    def is_held(self, digest: bytes) -> bool:
        """Return whether a request has begun with the content and waits to go on: it must stay in host memory."""
        return any(len(version.started) > len(version.running) for version in self.with_content(digest))

    def collect(self, resident: Container[object]) -> list[bytes]:
        """Forget drained versions that no request uses and no load is under way for, and mixes of which that is true
        and whose content is not `resident` either; returns the contents that no version has any more."""
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
        """Its digest, where no other version has it."""
        if version.digest is None:
            return []
        versions = self._contents[version.digest]
        del versions[version]
        if versions:
            return []
        del self._contents[version.digest]
        return [version.digest]

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
            assert all(part.version.current or part.version in self._newcomers.values() for part in parts)
        made = [part.version for version in everyone for part in version.parts]
        for version in everyone:
            assert version.num_mixes == made.count(version)
            assert version.current == (self._current.get(version.name) is version)
            version.check_integrity()
