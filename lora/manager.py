"""The adapters of an engine: registration, background loads, admission of requests, and the step's LoraBatch.

    disk --read--> host tier (parsed and packed, LRU) --write--> device rows (RowPool, LRU)

Reading and writing are the loader's threads', the rest is the engine's. A request is bound to a version when it is
added (`resolve`), waits alone while that version is not on the device (`admit`), and holds its rows from admission to
`release`. It stays bound, and the content that it began with in host memory, until it is gone for good (`forget`).
"""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..platform.core.config import LoRAConfig
from ..platform.core.errors import AdapterError, OutriderError, error_from_info
from ..platform.core.lora_request import LoRARequest
from ..platform.core.messages import AdapterInfo
from ..platform.core.request import Request
from .device.capacity import count_rows
from .device.layers import LoraBatch
from .device.pass_inputs import PlanRows, StepAdapters
from .device.pool import RowPool
from .device.sites import AdapterHooks, make_sites
from .files.folder import AdapterFiles
from .registry.catalog import Catalog, ReadAdapter
from .registry.registry import AdapterRegistry
from .registry.resolution import Resolver
from .registry.versions import AdapterVersion, Order, Refusal
from .tiers.residency import LEAST_URGENT, Residency
from .tiers.row_writer import Placer
from .tiers.starvation import LOOK_SECONDS, Aging
from .tiers.stats import AdapterStats
from .tiers.transfers import Read, Transfers, Written

if TYPE_CHECKING:
    from ..models.layers.linear import Linear

# Why a request waits: for its adapter to be read or written, for room on the device, for one of `max_loras` to go idle.
LOADING = "adapter_loading"
ROWS = "adapter_rows"
SEATS = "max_loras"


class AdapterManager:
    """See the module's docstring. Errors are typed and concern one adapter; they change nothing for the others."""

    def __init__(
        self,
        linears: Sequence[Linear],
        config: LoRAConfig,
        dtype: torch.dtype | str,
        device: torch.device | str,
        hooks: AdapterHooks = AdapterHooks(),  # noqa: B008  (immutable)
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Gives every linear its LoraSite; adapters are served in `dtype` on `device`. `close` it in the end.

        Raises:
            InvalidRequestError: `lora_memory` has no room for one adapter.
        """
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        self._clock = clock
        self._on_gone, max_rank = hooks.on_gone, config.max_lora_rank
        device = torch.device(device)
        sites = target, draft = make_sites(linears, hooks, dtype, device)
        num_rows = count_rows(config, sum(part.row_bytes for part in sites))
        pool = RowPool(num_rows, config.max_loras, hooks.before_evicting)
        for part in sites:
            part.allocate(pool.num_rows)
        self._files = AdapterFiles(
            target.modules, hooks.draft_method, draft.modules, max_rank=max_rank, dtype=dtype, layout=target.layout
        )
        self._registry = AdapterRegistry()
        self._transfers = Transfers(self._files, Placer(sites, device), reader_process=hooks.reader_process)
        self._residency = Residency(config, self._registry, pool, self._transfers.write)
        self._aging = Aging(self._registry, self._residency, clock)
        self._catalog = Catalog(self._files, self._registry, self._residency, self._transfers, self._changed)
        self._steps = StepAdapters(pool, dtype, device, max_rank, batch_invariant=hooks.batch_invariant)
        self._resolver = Resolver(self._files, self._registry, self._residency, self._changed)
        self._refusals: dict[AdapterVersion, Refusal] = {}  # since the last change; see `_changed`
        self._refused_until = 0.0

    # --- the registry, as users see it ---

    def reader(self, request: LoRARequest, *, load_inplace: bool = False) -> Callable[[], ReadAdapter]:
        """Reads and checks an adapter's files, for `load`; may be called in any thread. AdapterError comes out of it.

        Raises:
            InvalidUserInputError: at once, when the name is taken and `load_inplace` is not set.
        """
        self._poll()
        return self._catalog.reader(request, load_inplace=load_inplace)

    def load(
        self,
        request: LoRARequest,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        read: ReadAdapter | None = None,
    ) -> AdapterInfo:
        """Read, check and register an adapter now; see `Catalog.load`. Without `read` a pinned one is on the device
        when this returns."""
        self._poll()
        info = self._catalog.load(request, load_inplace=load_inplace, pinned=pinned, read=read)
        return self._wait_if_pinned(request.name, info) if read is None else info

    def _wait_if_pinned(self, name: str, info: AdapterInfo) -> AdapterInfo:
        """Return the info once the rows of a pinned adapter are written; at once for others."""
        if not info.pinned:
            return info
        version = self._registry.get(name)
        while version.error is None and not self._residency.pool.is_ready(version.digest):
            self.wait(1.0)
        if version.error is not None:
            raise error_from_info(version.error)
        return self._catalog.info(version)

    def register(self, requests: Sequence[LoRARequest]) -> None:
        """Make names known; see `Catalog.register`."""
        self._poll()
        self._catalog.register(requests)

    def unload(self, name: str, mode: str = "drain") -> builtins.list[Request]:
        """Forget a name; see `Catalog.unload`. Returns the requests that must be aborted."""
        self._poll()
        return self._catalog.unload(name, mode)

    def pin_reader(self, name: str) -> Callable[[], ReadAdapter] | None:
        """Reads what `pin` needs of an adapter that is not in memory, in any thread; None when it is."""
        self._poll()
        return self._catalog.pin_reader(name)

    def pin(self, name: str, *, read: ReadAdapter | None = None) -> AdapterInfo:
        """Keep a registered adapter on the device; see `Catalog.pin`."""
        self._poll()
        info = self._catalog.pin(name, read)
        return self._wait_if_pinned(name, info) if read is None else info

    def unpin(self, name: str) -> AdapterInfo:
        """Let a registered adapter make way for others again; NotFoundError when unknown."""
        self._poll()
        return self._catalog.unpin(name)

    def find(self, name: str) -> AdapterInfo | None:
        """The adapter registered under a name."""
        version = self._registry.find(name)
        return None if version is None else self._catalog.info(version)

    def list(self) -> builtins.list[AdapterInfo]:
        """The registered adapters, in the order of registration."""
        self._poll()
        return self._catalog.list()

    def stats(self) -> AdapterStats:
        """A snapshot; each load's duration is handed out once."""
        self._poll()
        return self._catalog.stats()

    # --- the scheduler's admission gate ---

    def resolve(self, request: Request) -> None:
        """Bind a new request to the version that its adapter's name has now, registering it from its path on first use;
        see `Resolver`. The files are read in the background; what is wrong with them comes out of `admit`.

        Raises:
            AdapterError: a path is not a folder.
        """
        if request.lora is None:
            return
        self._poll()
        version = self._resolver.version_of(request.lora)
        self._registry.bind(request, version, self._clock())
        # Those already refused room come first; `admit`, in the policy's order, sees to that.
        if version.digest not in self._residency.host and not self._aging.any_short:
            self._start_read(version, LEAST_URGENT)

    def admit(self, request: Request) -> str | None:
        """Let a request run: its rows are on the device and stay until `release` or `forget`.

        Returns:
            None when admitted (again, too, without effect), else why it must wait: LOADING, ROWS or SEATS.

        Raises:
            AdapterError: the adapter cannot be loaded; the request is forgotten.
        """
        version: AdapterVersion | None = request.adapter
        if version is None or request in version.running:
            return None
        self._poll()
        if self._refusals and self._clock() >= self._refused_until:
            self._changed()  # requests of different accounts change places without anything else
        refusal = self._refusals.get(version)
        if refusal is not None and request.order >= refusal.order:
            return refusal.reason
        if version.error is not None:
            self.forget(request)
            raise error_from_info(version.error)
        assert request in version.waiting, "the request was not resolved, or is forgotten"
        try:
            reason = self._bring(request, version)
        except AdapterError:
            self.forget(request)
            raise
        if reason is not None:
            return reason
        version.start(request)
        assert version.digest is not None
        self._residency.pool.retain(version.digest)
        if self._aging.clear_short(version):
            self._changed()  # others need not yield to it any more
        return None

    def prefetch(self, request: Request) -> None:
        """Bring what a waiting request needs nearer before its turn, where nothing more urgent has to make way."""
        version: AdapterVersion | None = request.adapter
        if version is None or version.error is not None or version in self._refusals or request not in version.waiting:
            return
        self._poll()
        with contextlib.suppress(AdapterError):  # `admit` will say so
            self._bring(request, version)

    def _bring(self, request: Request, version: AdapterVersion) -> str | None:
        """Bring the version nearer to the device; None when it is there, else what the request must wait for.

        Raises:
            AdapterError: there will never be room for it, or it could not be written.
        """
        first = version.first_waiting()
        reason = self._move(request, version, first.order if first is not None else request.order)
        if reason is not None:
            if not self._refusals:
                self._refused_until = self._clock() + LOOK_SECONDS
            self._refusals[version] = Refusal(request.order, reason)
            if not self._residency.is_moving(version):
                self._aging.set_short(version)
        return reason

    def _move(self, request: Request, version: AdapterVersion, claim: Order) -> str | None:
        residency, pool = self._residency, self._residency.pool
        entry = residency.host.get(version.digest)
        if entry is None:
            self._start_read(version, claim)
            return LOADING
        digest = entry.adapter.digest
        if self._aging.must_yield(request, version):
            return ROWS
        if digest not in pool:
            if not residency.place(entry, claim):
                residency.check_room_beside_pins(version.name, entry)
                return ROWS
            self._poll()  # a small one is written already: nobody who comes later may find it first
            if version.error is not None:
                raise error_from_info(version.error)
            if digest not in pool:
                return ROWS  # what else had ended was more urgent
        if not pool.is_ready(digest):
            return LOADING
        return None if pool.can_run(digest) else SEATS

    def release(self, request: Request) -> None:
        """The request was preempted, or found no room elsewhere: it holds no rows, stays bound to its version and waits
        as if it had never run. Without effect on one that was not admitted."""
        version: AdapterVersion | None = request.adapter
        if version is None or request not in version.running:
            return
        assert version.digest is not None
        version.preempt(request)
        self._residency.pool.release(version.digest)
        self._changed()

    def forget(self, request: Request) -> None:
        """The request is gone for good: it finished, failed or was aborted. Also for one that was never admitted."""
        self.release(request)
        version: AdapterVersion | None = request.adapter
        if version is not None and request in version.waiting:
            self._registry.unbind(request, version)
            if not version.waiting:
                self._aging.clear_short(version)
            self._changed()

    def wait(self, timeout: float) -> None:
        """Block up to `timeout` seconds until a read or a write ends; return at once when none is under way."""
        for ended in self._transfers.wait(timeout):
            self._finish(ended)

    # --- the runner's feature ---

    def prepare(self, rows: PlanRows) -> LoraBatch | None:
        """Inputs of the target's forward pass for rows of (adapter of an admitted request, number of tokens); None
        when all are the base model's."""
        self._transfers.step(count for _, count in rows)
        return self._steps.prepare(rows)

    def prepare_head(self, rows: PlanRows) -> LoraBatch | None:
        """Inputs for rows of logits; None when no adapter of theirs targets lm_head."""
        return self._steps.prepare_head(rows)

    def prepare_draft(self, rows: PlanRows) -> LoraBatch | None:
        """Inputs of the drafter's passes; None when no adapter of theirs has draft weights."""
        return self._steps.prepare_draft(rows)

    def namespace(self, request: Request) -> bytes:
        """Key of an admitted request's cached prefixes: the digest of its adapter's content, b"" for the base."""
        version: AdapterVersion | None = request.adapter
        if version is None:
            return b""
        assert version.digest is not None, "the adapter has not been read yet"
        return version.digest

    def start_reader(self) -> None:
        """Start the process that reads adapters, where it pays, before it is needed: its start disturbs steps."""
        self._transfers.start_reader()

    def close(self) -> None:
        """Stop the loader's threads and the reader process."""
        self._transfers.close()

    def check_integrity(self) -> None:
        """Rows, tiers, versions and requests agree."""
        self._registry.check_integrity()
        self._residency.check_integrity()

    # --- transfers ---

    def _start_read(self, version: AdapterVersion, claim: Order) -> None:
        """Read the version in the background, for a request as urgent as `claim`, when there is room for it."""
        size = version.num_bytes or None
        if not version.loading and self._residency.make_room(claim, self._transfers.num_reads, size):
            self._transfers.read(version, self._residency.host)

    def _poll(self) -> None:
        for ended in self._transfers.poll():
            self._finish(ended)

    def _finish(self, ended: Read | Written) -> None:
        """A transfer has ended; its error, if any, is that of the adapter's requests."""
        if isinstance(ended, Read):
            self._finish_read(ended)
        else:
            self._residency.written(ended.allocation, failed=ended.error is not None)
            if ended.error is not None:
                for version in tuple(self._registry.with_content(ended.allocation.key)):
                    if version.waiting or version.pinned:
                        self._fail(version, ended.error)
        self._residency.update_pins()
        self._changed()

    def _finish_read(self, read: Read) -> None:
        self._catalog.count_load(read.seconds)
        num_reads = self._transfers.num_reads
        errors = [self._take(part, num_reads + 1) for part in read.parts]  # the mix comes beside them; all are taken
        error = next(filter(None, errors), None)
        self._take(read if error is None or read.error is not None else read._replace(error=error), num_reads)

    def _take(self, read: Read, num_reads: int) -> OutriderError | None:
        """Give the version the content that was read, kept where there is room beside `num_reads` to come; return the
        error, if any."""
        version, entry = read.version, read.entry
        error = self._catalog.error_of(version, entry, read.error)
        if error is not None or entry is None:
            assert error is not None
            self._fail(version, error)
            return error
        first = version.first_waiting()
        claim = first.order if first is not None else LEAST_URGENT
        self._catalog.take_content(version, entry, read.seconds)
        # Its size is known only now. One that somebody waits for is kept if it must be: read again it is no smaller.
        if self._residency.make_room(claim, num_reads, entry.num_bytes) or first is not None:
            self._residency.host.put(entry)
        self._registry.succeed(version)
        return None

    def _fail(self, version: AdapterVersion, error: OutriderError) -> None:
        """Pass the error to the requests that wait for the version; later requests try again."""
        version.error = error.info()
        self._registry.fail(version)

    def _changed(self) -> None:
        """Something may be possible that was refused before. Also drops what no version needs any more."""
        self._refusals.clear()
        self._residency.changed()
        self._aging.changed()
        for digest in self._registry.collect(self._residency.host):
            self._residency.drop(digest)
            self._on_gone(digest)
