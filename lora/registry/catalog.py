"""Adapters by name: loaded, registered, unloaded, pinned, listed, and found for requests."""

from __future__ import annotations

import builtins
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from ...platform.core.errors import (
    AdapterError,
    InvalidRequestError,
    InvalidUserInputError,
    OutriderError,
    error_from_info,
)
from ...platform.core.lora_request import LoRA, LoRAMix, LoRARequest
from ...platform.core.messages import AdapterInfo
from ...platform.core.request import Request
from ..adapter import DRAFT_LOADED, Adapter, changed_error
from ..files.folder import AdapterFiles
from ..tiers.residency import LEAST_URGENT, Residency
from ..tiers.transfers import ReadDone, Transfers
from .adapter_stats import AdapterStats
from .pending_load import PendingLoad, replaced_error
from .registry import AdapterRegistry
from .versions import AdapterVersion, VersionPart

logger = logging.getLogger(__name__)

UNLOAD_MODES = ("drain", "abort")

MAX_LOAD_SECONDS = 1024
"""Durations of loads kept until the next `stats`."""
Replaced: TypeAlias = list[Request] | None
"""Gets the requests that a load in place replaces."""


class Catalog:
    """The verbs of `platform.core.adapter_verbs`, and the versions that requests are bound to."""

    def __init__(
        self,
        files: AdapterFiles,
        registry: AdapterRegistry,
        residency: Residency,
        transfers: Transfers,
        *,
        wait: Callable[[float], None],
        on_change: Callable[[], None],
    ) -> None:
        """`wait` waits at most that many seconds for a transfer, and records finished ones; `on_change` is called
        after every change of names and pins."""
        self._files = files
        self._registry = registry
        self._residency = residency
        self._transfers = transfers
        self.wait = wait
        self._on_change = on_change
        self._load_seconds: deque[float] = deque(maxlen=MAX_LOAD_SECONDS)
        self._loads: dict[AdapterVersion, PendingLoad] = {}  # whose files are being read

    # --- loads ---

    def start(self, verb: str, arguments: Mapping[str, Any]) -> PendingLoad | None:
        """Start a call of `load` or `pin`; None if the verb is another one, or needs no file.

        Raises:
            NotFoundError, InvalidUserInputError: as the verb does. AdapterError is raised by the result.
        """
        if verb == "load":
            return self._start_load(**arguments)
        return self._start_pin(**arguments) if verb == "pin" else None

    def _start_load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, replaced: Replaced = None
    ) -> PendingLoad:
        self.wait(0)
        check = partial(self._check_free, request.name, load_inplace=load_inplace)
        check()
        version = AdapterVersion(request.name, self._files.source(request))
        return self._start_read(version, check, pinned=pinned, replaced=replaced)

    def _start_pin(self, name: str) -> PendingLoad | None:
        self.wait(0)
        version = self._registry.get(name)
        if version.digest in self._residency.host:
            return None
        again = AdapterVersion(name, version.source, expected=version.expected)
        return self._start_read(again, partial(self._check_unchanged, again), pinned=True)

    def _start_read(
        self, version: AdapterVersion, check: Callable[[], None], *, pinned: bool, replaced: Replaced = None
    ) -> PendingLoad:
        def register(adapter: Adapter) -> AdapterVersion:
            check()
            registered = self._register(version, adapter, pinned=pinned)
            if replaced is not None:
                earlier = self._registry.requests_of(version.name)
                replaced.extend(request for request in earlier if adapter.digest not in request.adapter.digests)
            return registered

        self._loads[version] = pending = PendingLoad(register, self.wait, self.info)
        self._transfers.start_read(version)
        return pending

    def _check_unchanged(self, again: AdapterVersion) -> None:
        """Refuse (NotFoundError, InvalidUserInputError) to pin what was unloaded or replaced while it was read."""
        if (current := self._registry.get(again.name)).source != again.source:
            raise replaced_error(again.name)
        again.expected = current.expected  # files may have been loaded in place meanwhile

    def _check_free(self, name: str, *, load_inplace: bool = False) -> None:
        if not load_inplace and self._registry.find(name) is not None:
            raise InvalidUserInputError(f"The lora adapter '{name}' has already been loaded.", param="lora_name")

    def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, replaced: Replaced = None
    ) -> AdapterInfo:
        """Read, check and register an adapter now.

        Args:
            request: Name and folders.
            load_inplace: Replace an adapter of this name.
            pinned: Keep it on the device, where it is when this returns.
            replaced: Gets the requests on earlier versions, for the caller to abort; None: they finish there.

        Raises:
            AdapterError: the adapter cannot be served; an adapter registered under the name stays.
            InvalidUserInputError: the name is taken and `load_inplace` is not set, or it cannot be pinned: too many
                are, or running requests leave no room for it now.
        """
        pending = self._start_load(request, load_inplace=load_inplace, pinned=pinned, replaced=replaced)
        return self._info_after_write(pending.version(), wait=pinned)

    def _register(self, version: AdapterVersion, adapter: Adapter, *, pinned: bool) -> AdapterVersion:
        """Register a version whose files have been read, and load it into memory."""
        checked = self._checked(version, adapter)
        if isinstance(checked, AdapterError):
            raise checked
        host, num_reads = self._residency.host, self._transfers.num_reads
        if pinned:
            self._residency.pin(version.name, adapter, num_reads)
        elif adapter.digest in host or self._residency.make_room(LEAST_URGENT, num_reads, adapter.num_bytes):
            host.put(adapter)
        self._registry.register(version)
        self._take_content(version, adapter)
        self._set_pinned(version, pinned)
        return version

    def _info_after_write(self, version: AdapterVersion, *, wait: bool) -> AdapterInfo:
        """Describe a version; with `wait` after its rows are written.

        Raises:
            AdapterError: they cannot be written. InvalidUserInputError: a request that names another folder has
                replaced the version meanwhile.
        """
        while wait and version.current and version.error is None and not self._residency.pool.is_ready(version.digest):
            self.wait(1.0)
        if version.error is not None:
            raise error_from_info(version.error)
        if not version.current:
            raise replaced_error(version.name)
        return self.info(version)

    def register(self, requests: Sequence[LoRARequest]) -> None:
        """Register names without reading a file; files are read when requests arrive.

        Raises:
            InvalidUserInputError: a name is taken, or given twice. AdapterError: a folder does not exist. Nothing has
                changed.
        """
        self.wait(0)
        names: set[str] = set()
        for request in requests:
            if request.name in names:
                raise InvalidUserInputError(f"The lora adapter '{request.name}' is given twice.", param="lora_name")
            names.add(request.name)
            self._check_free(request.name)
            self._files.check(self._files.source(request))
        for request in requests:
            self._registry.register(AdapterVersion(request.name, self._files.source(request)))

    # --- results of reads ---

    def finish_read(self, read: ReadDone) -> None:
        """Set the contents that were read, of a version or of a mix's parts. An error fails the requests. The end of a
        read for `load` or `pin` is that call's."""
        self._load_seconds.append(read.seconds)
        if (load := self._loads.pop(read.version, None)) is not None:
            load.finish(read.result)
            return
        num_reads = self._transfers.num_reads
        errors = [self._finish_one(part, num_reads + 1) for part in read.parts]  # the mix itself needs room, too
        error = next(filter(None, errors), None)
        if error is not None and isinstance(read.result, Adapter):
            read = read._replace(result=error)
        self._finish_one(read, num_reads)

    def _finish_one(self, read: ReadDone, num_reads: int) -> OutriderError | None:
        """Set a version's content, and keep it in host memory if there is room in addition to `num_reads` reads in
        flight. Returns the error, if any."""
        version, adapter = read.version, read.result
        if isinstance(adapter, Adapter):
            adapter = self._checked(version, adapter)
        elif isinstance(adapter, AdapterError) and version.expected is not None and not version.parts:
            adapter = changed_error(version.name, adapter.message)
        if isinstance(adapter, OutriderError):
            self._registry.fail(version, adapter)
            return adapter
        first = version.first_waiting()
        order = first.order if first is not None else LEAST_URGENT
        self._take_content(version, adapter)
        # Its size is not known before. If a request waits for it, it is kept anyway: a second read makes it no smaller.
        if self._residency.make_room(order, num_reads, adapter.num_bytes) or first is not None:
            self._residency.host.put(adapter)
        self._registry.promote(version)
        return None

    def _checked(self, version: AdapterVersion, adapter: Adapter) -> Adapter | AdapterError:
        """Return the adapter, or why it cannot be the version's content."""
        if version.expected not in (None, adapter.digest):
            return changed_error(version.name)
        try:
            self._residency.check_fits(version.name, adapter)
        except AdapterError as error:
            return error
        return adapter

    def _take_content(self, version: AdapterVersion, adapter: Adapter) -> None:
        if version.digest is None and adapter.draft not in ("", DRAFT_LOADED):
            logger.warning("adapter %r is served without its draft weights: %r", version.name, adapter.draft)
        if version.digest is None and (left_out := adapter.target.left_out):
            text = "adapter %r is served without its %d tensors of a vision tower, such as %r"
            logger.warning(text, version.name, len(left_out), left_out[0])
        self._registry.take_content(version, adapter)
        self._residency.counts.loaded(version.label, "host")

    # --- unloads ---

    def unload(self, name: str, mode: str = "drain") -> builtins.list[Request]:
        """Remove a name; its content is dropped with the last request that has it.

        Args:
            name: Name of the adapter.
            mode: "drain": requests that have it finish. "abort": they are aborted now, even those of versions that were
            unloaded or replaced before.

        Returns:
            The requests that the caller must abort.

        Raises:
            NotFoundError: the name is unknown. InvalidRequestError: there is no such mode.
        """
        self.wait(0)
        if mode not in UNLOAD_MODES:
            raise InvalidRequestError(f"mode must be one of {', '.join(UNLOAD_MODES)}; got {mode!r}", param="mode")
        ending = self._registry.requests_of(name) if mode == "abort" else []
        if self._registry.find(name) is not None or not ending:
            self._registry.remove(name)
        self._residency.update_pins()
        self._on_change()
        return ending

    # --- pins ---

    def pin(self, name: str) -> AdapterInfo:
        """Keep a registered adapter on the device, where it is when this returns. One that is not in memory is read
        again.

        Raises:
            NotFoundError: the name is unknown. InvalidUserInputError, AdapterError: as in `load`; it is not pinned.
        """
        pending = self._start_pin(name)
        return self._info_after_write(self._pin_held(name) if pending is None else pending.version(), wait=True)

    def _pin_held(self, name: str) -> AdapterVersion:
        version = self._registry.get(name)
        adapter = self._residency.host.get(version.digest)
        assert adapter is not None
        self._residency.pin(name, adapter, self._transfers.num_reads)
        self._set_pinned(version, True)
        return version

    def unpin(self, name: str) -> AdapterInfo:
        """Let a registered adapter be evicted again; NotFoundError when the name is unknown."""
        self.wait(0)
        version = self._registry.get(name)
        self._set_pinned(version, False)
        return self.info(version)

    def _set_pinned(self, version: AdapterVersion, pinned: bool) -> None:
        self._registry.set_pinned(version, pinned)
        self._on_change()
        self._residency.update_pins()

    # --- versions for requests ---

    def bind_version(self, lora: LoRA) -> AdapterVersion:
        """Return the version for a new request, and register its names on first use.

        A registered content stays even if its files change: when read again, they are refused. A request that names
        other folders replaces it once these have been read. A mix's version lasts as long as those of its parts.

        Raises:
            AdapterError: a path is not a folder; nothing has changed.
        """
        if isinstance(lora, LoRARequest):
            return self._version_of_adapter(lora)
        known = self._find_mix(lora)
        if known is not None and known.digest in self._residency.host:
            return known  # the files of its parts are not needed
        for part in lora.parts:
            version = self._match(part.request)
            self._files.check(self._files.source(part.request) if version is None else version.source)
        parts = tuple(VersionPart(self._version_of_adapter(part.request), part.weight) for part in lora.parts)
        return self._registry.mix(lora.name, parts)

    def _find_mix(self, mix: LoRAMix) -> AdapterVersion | None:
        parts = []
        for request, weight in mix.parts:
            version = self._match(request)
            if version is None:
                return None
            parts.append(VersionPart(version, weight))
        return self._registry.find_mix(tuple(parts))

    def _version_of_adapter(self, request: LoRARequest) -> AdapterVersion:
        version = self._match(request)
        if version is None:
            source = self._files.source(request)
            self._files.check(source)
            version = self._registry.add_candidate(request.name, source)
            self._residency.update_pins()
            self._on_change()
        return version

    def _match(self, request: LoRARequest) -> AdapterVersion | None:
        """Return the version that a request means. One that was sent while its adapter was loaded in place has the old
        files, and means the new version."""
        version = self._registry.find(request.name) if request.loaded else None
        return version or self._registry.match(request.name, self._files.source(request))

    # --- lists ---

    def find(self, name: str) -> AdapterInfo | None:
        """Return the adapter registered under a name."""
        version = self._registry.find(name)
        return None if version is None else self.info(version)

    def list(self) -> builtins.list[AdapterInfo]:
        """Return the registered adapters, in the order of registration."""
        self.wait(0)
        return [self.info(version) for version in self._registry.current()]

    def info(self, version: AdapterVersion) -> AdapterInfo:
        """Describe a version."""
        return AdapterInfo(
            name=version.name,
            path=version.source.path,
            digest=version.digest.hex() if version.digest else "",
            rank=version.rank,
            rows=version.rows,
            level=self._residency.level(version.digest),
            pinned=version.pinned,
            num_running=len(version.running),
            draft=version.draft,
            num_waiting=len(version.waiting),
            num_bytes=version.num_bytes,
            load_seconds=version.load_seconds,
        )

    def stats(self) -> AdapterStats:
        """Return a snapshot; each load's duration is in one snapshot only. The time that this takes depends on the
        adapters in memory, not on those registered."""
        self.wait(0)
        registry, residency, pool = self._registry, self._residency, self._residency.pool
        seconds = [*self._load_seconds]
        self._load_seconds.clear()
        in_use = dict.fromkeys(registry.in_use())
        in_memory = dict.fromkeys(version for digest in residency.host for version in registry.with_content(digest))
        return AdapterStats(
            adapters=[self.info(version) for version in {**in_memory, **in_use} if version.current],
            running=sorted({version.label for version in in_use if version.running}),
            waiting=sorted({version.label for version in in_use if version.waiting}),
            load_seconds=seconds,
            num_adapters=len(registry),
            host_bytes=residency.host.num_bytes,
            rows_used=pool.num_rows - pool.num_free,
            num_rows=pool.num_rows,
            load_failures=registry.num_failures,
            device_evictions=residency.num_device_evictions,
            host_evictions=residency.num_host_evictions,
            transfers=residency.counts.entries(),
        )
