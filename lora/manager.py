"""The adapters of an engine: its parts, admission of requests, and the adapters of each step.

    disk --read--> host tier (packed adapters, LRU) --write--> device rows (RowPool, LRU)

Loader threads read and write; the engine's thread does everything else. A request is bound to a version when it is
added (`resolve`), waits, without delaying others, while that version is not on the device (`admit`), and holds its rows
from admission to `release`. It stays bound to the version, whose content stays in host memory, until it ends
(`forget`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..platform.core.config import LoRAConfig
from ..platform.core.errors import AdapterError, InvalidUserInputError, error_from_info
from ..platform.core.request import Request
from .device.batching import PlanRows, StepAdapters
from .device.layers import LoraBatch
from .device.learnt import LearntRows, ModuleWeights
from .device.pool import RowPool, count_rows
from .device.sites import AdapterHooks, TargetDraftSites, make_sites
from .files.folder import AdapterFiles
from .registry.catalog import Catalog
from .registry.registry import AdapterRegistry
from .registry.versions import AdapterVersion, Order, Refusal
from .target_draft import read_target_draft, write_target_draft
from .tiers.residency import LEAST_URGENT, Residency
from .tiers.row_writer import RowWriter
from .tiers.starvation import LOOK_SECONDS, Aging
from .tiers.transfers import ReadDone, Transfers, WriteDone

if TYPE_CHECKING:
    from ..models.layers.linear import Linear

# Reasons why a request waits: its adapter is read or written, the device has no room, or `max_loras` others run.
LOADING = "adapter_loading"
ROWS = "adapter_rows"
MAX_LORAS = "max_loras"


class AdapterManager:
    """See the module's docstring. Errors are typed and affect one adapter only."""

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
        """Give every linear its LoraSite, for adapters in `dtype` on `device`. `close` must be called in the end.

        Raises:
            InvalidRequestError: `lora_memory` has no room for one adapter, or `hooks.target_draft` does not fit.
        """
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        self._clock = clock
        self._on_gone, max_rank = hooks.on_gone, config.max_lora_rank
        device = torch.device(device)
        sites = target, draft = make_sites(linears, hooks, dtype, device)
        row_bytes = sum(part.row_bytes for part in sites)
        own_draft = None  # draft weights of the base model
        if hooks.target_draft is not None and isinstance(draft, TargetDraftSites):
            own_draft = read_target_draft(hooks.target_draft, draft)
        pool = RowPool(
            count_rows(config, row_bytes, 1 if own_draft is None else 2),
            config.max_loras,
            row_bytes=0 if config.memory_bytes is None else row_bytes,
            on_free=hooks.on_free,
        )
        target.allocate(pool.num_rows + (0 if own_draft is None else own_draft.rank))
        draft.allocate(pool.num_rows + hooks.num_learners * hooks.learnt_rank)
        self.learnt = LearntRows(draft, pool.num_rows, hooks.learnt_rank, hooks.num_learners)
        """Rows of draft weights that are learnt while serving."""
        self._files = AdapterFiles(target.model, draft.model, draft_method=hooks.draft_method, max_rank=max_rank)
        self._registry = AdapterRegistry()
        writer = RowWriter(sites, device, hooks.on_write)
        self._transfers = Transfers(
            self._files,
            writer,
            num_threads=hooks.num_readers,
            max_bytes=config.max_cpu_bytes,
            reader_process=hooks.reader_process,
        )
        self._residency = Residency(config, self._registry, pool, self._transfers.write)
        self._aging = Aging(self._registry, self._residency, clock)
        self.catalog = Catalog(
            self._files, self._registry, self._residency, self._transfers, wait=self.wait, on_change=self._changed
        )
        """The adapters by name, for users who load, unload, pin and list them."""
        self._steps = StepAdapters(
            *(pool, dtype, device, max_rank),
            batch_invariant=hooks.batch_invariant,
            target_draft=None if own_draft is None else write_target_draft(target, own_draft, pool.num_rows),
        )
        self.prepare_head = self._steps.prepare_head
        self.prepare_draft = self._steps.prepare_draft if own_draft is None else self._steps.prepare_target_draft
        self._refusals: dict[AdapterVersion, Refusal] = {}  # since the last change; see `_changed`
        self._refused_until = 0.0

    # --- admission of requests ---

    def resolve(self, request: Request) -> None:
        """Bind a new request to the current version of its adapter's name; see `Catalog.bind_version`. The files are
        read in the background; `admit` raises their errors.

        Raises:
            AdapterError: a path is not a folder.
        """
        if request.lora is None:
            return
        self._poll()
        version = self.catalog.bind_version(request.lora)
        self._registry.bind(request, version, self._clock())
        # `admit`, called in the policy's order, serves requests that were refused room first.
        if version.digest not in self._residency.host and not self._aging.any_blocked:
            self._start_read(version, LEAST_URGENT)

    def admit(self, request: Request) -> str | None:
        """Admit a request: its rows are on the device and stay until `release` or `forget`.

        Returns:
            None when admitted (repeated calls have no effect), else why it must wait: LOADING, ROWS or MAX_LORAS.

        Raises:
            AdapterError: the adapter cannot be loaded; the request is forgotten.
        """
        version: AdapterVersion | None = request.adapter
        if version is None or request in version.running:
            return None
        self._poll()
        if self._refusals and self._clock() >= self._refused_until:
            self._changed()  # the order of requests of different accounts changes with time
        refusal = self._refusals.get(version)
        if refusal is not None and request.order >= refusal.order:
            return refusal.reason
        if version.error is not None:
            self.forget(request)
            raise error_from_info(version.error)
        assert request in version.waiting, "the request was not resolved, or is forgotten"
        try:
            reason = self._load(request, version)
        except AdapterError:
            self.forget(request)
            raise
        if reason is not None:
            return reason
        request.num_base_tokens = version.count_base_tokens(request.tokens[: request.num_prompt_tokens])
        version.start(request)
        assert version.digest is not None
        self._residency.pool.retain(version.digest)
        if self._aging.unblock(version):
            self._changed()  # others need not yield to it any more
        return None

    def prefetch(self, request: Request) -> None:
        """Load the adapter of a waiting request before its turn, if nothing more urgent has to be evicted."""
        version: AdapterVersion | None = request.adapter
        if version is None or version.error is not None or version in self._refusals or request not in version.waiting:
            return
        self._poll()
        with contextlib.suppress(AdapterError):  # `admit` raises it again
            self._load(request, version)

    def _load(self, request: Request, version: AdapterVersion) -> str | None:
        """Start the version's next transfer; None when it may run, else the reason why the request must wait.

        Raises:
            AdapterError: it can never fit, or it could not be written.
        """
        first = version.first_waiting()
        reason = self._transfer(request, version, first.order if first is not None else request.order)
        if reason is not None:
            if not self._refusals:
                self._refused_until = self._clock() + LOOK_SECONDS
            self._refusals[version] = Refusal(request.order, reason)
            if not self._residency.is_moving(version):
                self._aging.block(version)
        return reason

    def _transfer(self, request: Request, version: AdapterVersion, order: Order) -> str | None:
        residency, pool = self._residency, self._residency.pool
        adapter = residency.host.get(version.digest)
        if adapter is None:
            self._start_read(version, order)
            return LOADING
        digest = adapter.digest
        if self._aging.must_yield(request, version):
            return ROWS
        if digest not in pool:
            if not residency.place(adapter, order):
                residency.check_room_without_pins(version.name, adapter)
                return ROWS
            self._poll()  # a small adapter is written already; this request must use it before any later one
            if version.error is not None:
                raise error_from_info(version.error)
            if digest not in pool:
                return ROWS  # another finished transfer was more urgent
        if not pool.is_ready(digest):
            return LOADING
        return None if pool.can_run(digest) else MAX_LORAS

    def release(self, request: Request) -> None:
        """Release the rows of a request that was preempted, or found no other room. It stays bound to its version and
        waits as if it had never run. No effect on one that was not admitted."""
        version: AdapterVersion | None = request.adapter
        if version is None or request not in version.running:
            return
        assert version.digest is not None
        version.preempt(request)
        self._residency.pool.release(version.digest)
        self._changed()

    def forget(self, request: Request) -> None:
        """Unbind a request that finished, failed or was aborted, admitted or not."""
        self.release(request)
        version: AdapterVersion | None = request.adapter
        if version is not None and request in version.waiting:
            self._registry.unbind(request, version)
            if not version.waiting:
                self._aging.unblock(version)
            self._changed()

    def namespace(self, request: Request) -> bytes:
        """Return the key of an admitted request's cached prefixes: its adapter's digest, b"" for the base model."""
        version: AdapterVersion | None = request.adapter
        if version is None:
            return b""
        assert version.digest is not None, "the adapter has not been read yet"
        return version.digest

    def draft_weights(self, digest: bytes) -> ModuleWeights | None:
        """Return the draft weights of an adapter; {} if it has none, and for the base model (b""); None if the adapter
        is not in host memory."""
        if not digest:
            return {}
        adapter = self._residency.host.get(digest)
        return None if adapter is None else adapter.drafter.linears.weights()

    def vocab_size(self, request: Request) -> int:
        """Return the number of tokens of an admitted request's adapter; 0 if it is the base model's."""
        version: AdapterVersion | None = request.adapter
        return 0 if version is None else version.vocab_size

    # --- steps ---

    def prepare(self, rows: PlanRows, *, always: bool = False) -> LoraBatch | None:
        """Return the adapters of a step of the target; see `StepAdapters.prepare`. `prepare_head` and `prepare_draft`
        are those for its logits and for the drafter."""
        if self._transfers.reader is not None:
            self._transfers.reader.flag.update(count for _, count in rows)
        return self._steps.prepare(rows, always=always)

    def start_reader(self) -> None:
        """Start the reader process, if enabled, before it is needed: its start slows steps down."""
        if self._transfers.reader is not None:
            self._transfers.reader.start()

    # --- transfers ---

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a read or a write to end, unless none is in flight."""
        for done in self._transfers.wait(timeout):
            self._finish(done)

    def _poll(self) -> None:
        for done in self._transfers.poll():
            self._finish(done)

    def _start_read(self, version: AdapterVersion, order: Order) -> None:
        """Read the version in the background, for a request of this order, if there is room for it."""
        size = version.num_bytes or None
        if not version.loading and self._residency.make_room(order, self._transfers.num_reads, size):
            self._transfers.read(version, self._residency.host)

    def _finish(self, done: ReadDone | WriteDone) -> None:
        """Record a finished transfer. Its error, if any, fails only the adapter's requests."""
        if isinstance(done, ReadDone):
            self.catalog.finish_read(done)
        else:
            self._residency.written(done.allocation, failed=done.error is not None)
            if done.error is not None:
                for version in tuple(self._registry.with_content(done.allocation.key)):
                    if version.waiting or version.pinned:
                        self._registry.fail(version, done.error)
        self._residency.update_pins()
        self._changed()

    def _changed(self) -> None:
        """Retry refused requests, and drop contents that no version needs any more."""
        self._refusals.clear()
        self._residency.changed()
        self._aging.changed()
        for digest in self._registry.collect(self._residency.host):
            self._residency.drop(digest)
            self._on_gone(digest)

    def close(self) -> None:
        """Stop the loader threads and the reader process."""
        self._transfers.close()

    def check_base_may_change(self) -> None:
        """Refuse (InvalidUserInputError) other weights of the base model while an adapter is loaded that was computed
        from them when it was read: trained magnitudes (DoRA), or biases."""
        for digest in self._residency.host:
            adapter = self._residency.host.peek(digest)
            if adapter.target.gains or adapter.target.biases:
                names = ", ".join(sorted(version.name for version in self._registry.with_content(digest)))
                raise InvalidUserInputError(
                    f"the adapter {names} has magnitudes or biases that were computed from the base model's weights: "
                    "unload it before these change, and load it again",
                    param="path",
                )

    def check_integrity(self) -> None:
        """Check that rows, tiers, versions and requests agree."""
        self._registry.check_integrity()
        self._residency.check_integrity()
