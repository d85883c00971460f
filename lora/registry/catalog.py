"""The adapters by name, as those see them who load, unload, pin and list them."""

from __future__ import annotations

import builtins
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError, OutriderError
from ...platform.core.lora_request import LoRARequest
from ...platform.core.messages import AdapterInfo
from ...platform.core.request import Request
from ..adapter import LOADED, changed_error
from ..files.folder import AdapterFiles
from ..tiers.residency import LEAST_URGENT, Residency
from ..tiers.row_writer import HostEntry
from ..tiers.stats import AdapterStats, describe, snapshot
from ..tiers.transfers import Transfers
from .registry import AdapterRegistry
from .versions import AdapterVersion

logger = logging.getLogger(__name__)

UNLOAD_MODES = ("drain", "abort")

# Durations of loads kept for a statistics reader who never comes.
MAX_LOAD_SECONDS = 1024


class ReadAdapter(NamedTuple):
    """An adapter's files, read and checked, before it is registered."""

    entry: HostEntry
    seconds: float


class Catalog:
    """Changes names and pins, and brings what is loaded into memory."""

    def __init__(
        self,
        files: AdapterFiles,
        registry: AdapterRegistry,
        residency: Residency,
        transfers: Transfers,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called after every change."""
        self._files = files
        self._registry = registry
        self._residency = residency
        self._transfers = transfers
        self._on_change = on_change
        self._load_seconds: deque[float] = deque(maxlen=MAX_LOAD_SECONDS)

    # --- loads ---

    def reader(self, request: LoRARequest, *, load_inplace: bool = False) -> Callable[[], ReadAdapter]:
        """Reads and checks an adapter's files, for `load`; may be called in any thread. AdapterError comes out of it.

        Raises:
            InvalidUserInputError: at once, when the name is taken and `load_inplace` is not set.
        """
        if not load_inplace:
            self._check_free(request.name)
        reading = self._transfers.reading(self._files.source(request))

        def read() -> ReadAdapter:
            started = time.perf_counter()
            entry = reading()
            return ReadAdapter(entry, time.perf_counter() - started)

        return read

    def _check_free(self, name: str) -> None:
        if self._registry.find(name) is not None:
            raise InvalidUserInputError(f"The lora adapter '{name}' has already been loaded.", param="lora_name")

    def load(
        self, request: LoRARequest, *, load_inplace: bool, pinned: bool, read: ReadAdapter | None = None
    ) -> AdapterInfo:
        """Read, check and register an adapter now.

        Args:
            request: Name and folders.
            load_inplace: Replace an adapter of this name; requests on it finish on the content that they began with.
            pinned: Keep it on the device, to which it is on its way when this returns.
            read: What `reader` made of its files; they are not read again.

        Raises:
            AdapterError: the adapter cannot be served; an adapter registered under the name stays.
            InvalidUserInputError: the name is taken and `load_inplace` is not set, or it cannot be pinned: too many
                are, or running requests leave no room for it now.
        """
        read_now = self.reader(request, load_inplace=load_inplace)  # refuses a name that is taken
        entry, seconds = read if read is not None else read_now()
        self.count_load(seconds)
        self._residency.check_fits(request.name, entry)
        host, num_reads = self._residency.host, self._transfers.num_reads
        if pinned:
            self._residency.pin(request.name, entry, num_reads)
        elif entry.adapter.digest in host or self._residency.make_room(LEAST_URGENT, num_reads, entry.num_bytes):
            host.put(entry)
        version = self._registry.register(request.name, self._files.source(request))
        self.take_content(version, entry, seconds)
        self._set_pinned(version, pinned)
        return self.info(version)

    def register(self, requests: Sequence[LoRARequest]) -> None:
        """Make names known without reading a file: that is done when requests come.

        Raises:
            InvalidUserInputError: a name is taken, or given twice. AdapterError: a folder does not exist. Nothing has
                changed.
        """
        names: set[str] = set()
        for request in requests:
            if request.name in names:
                raise InvalidUserInputError(f"The lora adapter '{request.name}' is given twice.", param="lora_name")
            names.add(request.name)
            self._check_free(request.name)
            self._files.check(self._files.source(request))
        for request in requests:
            self._registry.register(request.name, self._files.source(request))

    def error_of(
        self, version: AdapterVersion, entry: HostEntry | None, error: OutriderError | None
    ) -> OutriderError | None:
        """Why what was read, or the reason that nothing was, cannot be the version's content; None: it can."""
        if entry is not None:
            if version.expected not in (None, entry.adapter.digest):
                return changed_error(version.name)
            try:
                self._residency.check_fits(version.name, entry)
            except AdapterError as caught:
                return caught
        elif isinstance(error, AdapterError) and version.expected is not None and not version.parts:
            return changed_error(version.name, error.message)
        return error

    def take_content(self, version: AdapterVersion, entry: HostEntry, seconds: float) -> None:
        """Take what was read, in so many seconds, is the version's content."""
        if version.digest is None and entry.adapter.draft not in ("", LOADED):
            logger.warning("adapter %r is served without its draft weights: %r", version.name, entry.adapter.draft)
        version.load_seconds = seconds
        self._registry.take_content(version, entry)

    def count_load(self, seconds: float) -> None:
        """A load has ended, or failed."""
        self._load_seconds.append(seconds)

    # --- unloads ---

    def unload(self, name: str, mode: str = "drain") -> builtins.list[Request]:
        """Forget a name; its content leaves memory with the last request that has it.

        Args:
            name: Of the adapter.
            mode: "drain": requests that have it finish. "abort": they end now, also those of versions that were
                unloaded or replaced before.

        Returns:
            The requests that the caller must abort.

        Raises:
            NotFoundError: the name is unknown. InvalidRequestError: there is no such mode.
        """
        if mode not in UNLOAD_MODES:
            raise InvalidRequestError(f"mode must be one of {', '.join(UNLOAD_MODES)}; got {mode!r}", param="mode")
        ending = self._registry.requests_of(name) if mode == "abort" else []
        if self._registry.find(name) is not None or not ending:
            self._registry.remove(name)
        self._residency.update_pins()
        self._on_change()
        return ending

    # --- pins ---

    def pin_reader(self, name: str) -> Callable[[], ReadAdapter] | None:
        """Reads what `pin` needs of an adapter that is not in memory, in any thread; None when it is.

        Raises:
            NotFoundError: the name is unknown.
        """
        version = self._registry.get(name)
        if version.digest in self._residency.host:
            return None
        return self.reader(self._request_for(version), load_inplace=True)

    def pin(self, name: str, read: ReadAdapter | None) -> AdapterInfo:
        """Keep a registered adapter on the device, to which it is on its way when this returns.

        One that is not in memory is loaded again, from `read` if that is given.

        Raises:
            NotFoundError: the name is unknown. InvalidUserInputError, AdapterError: as in `load`; it is not pinned.
        """
        version = self._registry.get(name)
        entry = self._residency.host.get(version.digest)
        if entry is None:
            read = read if read is not None else self.reader(self._request_for(version), load_inplace=True)()
            if version.expected not in (None, read.entry.adapter.digest):
                raise changed_error(name)
            return self.load(self._request_for(version), load_inplace=True, pinned=True, read=read)
        self._residency.pin(name, entry, self._transfers.num_reads)
        self._set_pinned(version, True)
        return self.info(version)

    def unpin(self, name: str) -> AdapterInfo:
        """Let a registered adapter make way for others again; NotFoundError when the name is unknown."""
        version = self._registry.get(name)
        self._set_pinned(version, False)
        return self.info(version)

    def _set_pinned(self, version: AdapterVersion, pinned: bool) -> None:
        self._registry.set_pinned(version, pinned)
        self._on_change()
        self._residency.update_pins()

    @staticmethod
    def _request_for(version: AdapterVersion) -> LoRARequest:
        path, draft_path, digest = version.source
        return LoRARequest(version.name, path=path, draft_path=draft_path, digest=digest)

    # --- what there is ---

    def info(self, version: AdapterVersion) -> AdapterInfo:
        """One version as users see it."""
        return describe(version, self._residency)

    def list(self) -> builtins.list[AdapterInfo]:
        """The registered adapters, in the order of registration."""
        return [self.info(version) for version in self._registry.current()]

    def stats(self) -> AdapterStats:
        """A snapshot; each load's duration is handed out once."""
        seconds = [*self._load_seconds]
        self._load_seconds.clear()
        return snapshot(self._registry, self._residency, seconds)
