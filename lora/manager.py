"""The adapters of an engine: registration, background loads, admission of requests, and the step's LoraBatch.

    disk --loader thread--> host tier (parsed, LRU) --admit()--> device rows (RowPool, LRU)

Everything but the parsing runs in the engine's thread. A request is bound to a version when it is added (`resolve`),
waits alone while that version is not on the device (`admit`), and holds its rows from admission to `release`. It stays
bound, and the content that it began with in host memory, until it is gone for good (`forget`).
"""

from __future__ import annotations

import builtins
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..platform.core.config import LoRAConfig
from ..platform.core.errors import InvalidUserInputError, error_from_info
from ..platform.core.lora_request import LoRARequest
from ..platform.core.messages import AdapterInfo
from ..platform.core.request import Request
from .adapter import LOADED, Adapter
from .files import AdapterFiles
from .layers import LoraBatch
from .loader import AdapterLoader, Loaded, ReadAdapter
from .peft_config import adapter_error
from .pool import RowPool
from .preparing import PlanRows, StepAdapters
from .registry import AdapterRegistry, AdapterVersion, Order
from .residency import LEAST_URGENT, Residency
from .sites import AdapterHooks, make_sites

if TYPE_CHECKING:
    from ..models.layers.linear import Linear

logger = logging.getLogger(__name__)

# Why a request must wait.
LOADING = "adapter_loading"
ROWS = "adapter_rows"

# Durations of loads kept for a statistics reader who never comes.
MAX_LOAD_SECONDS = 1024


class AdapterStats(NamedTuple):
    """A snapshot for the engine's statistics."""

    adapters: list[AdapterInfo]
    running: list[str]
    """Names with admitted requests."""
    waiting: list[str]
    """Names with requests to be admitted."""
    load_seconds: list[float]
    """Durations of the latest loads that ended since the last snapshot, failed ones too."""


class _Refusal(NamedTuple):
    """Why requests of a version as urgent as `order`, or less, must wait until something changes."""

    order: Order
    reason: str


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
        """Gives every linear its LoraSite; adapters are served in `dtype` on `device`. `close` it in the end."""
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        self._clock = clock
        self._on_gone = hooks.on_gone
        device = torch.device(device)
        pool = RowPool(config.max_loras * config.max_lora_rank, config.max_loras)
        target, draft = make_sites(linears, hooks, pool.num_rows, dtype, device)
        self._files = AdapterFiles(
            target.modules, hooks.draft_method, draft.modules, max_rank=config.max_lora_rank, dtype=dtype
        )
        self._registry = AdapterRegistry()
        self._residency = Residency(config, self._registry, pool, (target, draft), clock)
        self._loader: AdapterLoader[AdapterVersion] = AdapterLoader(self._files.read)
        self._steps = StepAdapters(pool, dtype, device, batch_invariant=hooks.batch_invariant)
        self._load_seconds: deque[float] = deque(maxlen=MAX_LOAD_SECONDS)
        self._refusals: dict[AdapterVersion, _Refusal] = {}  # since the last change; see `_changed`

    # --- the registry, as users see it ---

    def reader(self, request: LoRARequest, *, load_inplace: bool = False) -> Callable[[], ReadAdapter]:
        """Reads and checks an adapter's files, for `load`; may be called in any thread. AdapterError comes out of it.

        Raises:
            InvalidUserInputError: at once, when the name is taken and `load_inplace` is not set.
        """
        self._poll()
        if self._registry.find(request.name) is not None and not load_inplace:
            raise InvalidUserInputError(
                f"The lora adapter '{request.name}' has already been loaded.", param="lora_name"
            )

        def read() -> ReadAdapter:
            started = time.perf_counter()
            adapter = self._files.read(self._files.source(request))
            return ReadAdapter(adapter, time.perf_counter() - started)

        return read

    def load(
        self,
        request: LoRARequest,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        read: ReadAdapter | None = None,
    ) -> AdapterInfo:
        """Read, check and register an adapter now.

        Args:
            request: Name and folders.
            load_inplace: Replace an adapter of this name; requests on it finish on the content that they began with.
            pinned: Keep it on the device.
            read: What `reader` made of its files; they are not read again.

        Raises:
            AdapterError: the adapter cannot be served; an adapter registered under the name stays.
            InvalidUserInputError: the name is taken and `load_inplace` is not set, or it cannot be pinned: too many
                are, or running requests leave no room for it now.
        """
        read_now = self.reader(request, load_inplace=load_inplace)  # refuses a name that is taken
        adapter, seconds = read if read is not None else read_now()
        self._load_seconds.append(seconds)
        if pinned:
            self._residency.pin(request.name, adapter, self._loader.num_in_flight)
        elif adapter.digest in self._residency.host or self._make_room(LEAST_URGENT):
            self._residency.host.put(adapter)
        version = self._registry.register(request.name, self._files.source(request))
        self._take_content(version, adapter)
        version.pinned = pinned
        self._changed()
        self._residency.update_pins()
        return self._info(version)

    def unload(self, name: str) -> None:
        """Forget a name; NotFoundError when unknown. Requests that have it finish; it leaves memory with the last."""
        self._poll()
        self._registry.remove(name)
        self._changed()
        self._residency.update_pins()

    def list(self) -> builtins.list[AdapterInfo]:
        """The registered adapters, in the order of registration."""
        self._poll()
        return [self._info(version) for version in self._registry.current()]

    def stats(self) -> AdapterStats:
        """A snapshot; each load's duration is handed out once."""
        self._poll()
        seconds = [*self._load_seconds]
        self._load_seconds.clear()
        versions = [*self._registry]
        return AdapterStats(
            adapters=[self._info(version) for version in self._registry.current()],
            running=sorted({version.name for version in versions if version.running}),
            waiting=sorted({version.name for version in versions if version.waiting}),
            load_seconds=seconds,
        )

    def _info(self, version: AdapterVersion) -> AdapterInfo:
        return AdapterInfo(
            name=version.name,
            path=version.path,
            digest=version.digest.hex() if version.digest else "",
            rank=version.rank,
            rows=version.rows,
            level=self._residency.level(version.digest),
            pinned=version.pinned,
            num_running=len(version.running),
            draft=version.draft,
        )

    # --- the scheduler's admission gate ---

    def resolve(self, request: Request) -> None:
        """Bind a new request to the version that its adapter's name has now, registering it from its path on first use.

        The files are read in the background; what is wrong with them comes out of `admit`. A registered content stays
        the registered one when its files change, as long as it is in memory; a request that names other folders
        replaces it once these have been read.

        Raises:
            AdapterError: a path is not a folder.
        """
        if request.lora is None:
            return
        self._poll()
        source = self._files.source(request.lora)
        version = self._registry.match(request.lora.name, source)
        if version is None:
            self._files.check(source)
            version = self._registry.introduce(request.lora.name, source)
            self._residency.update_pins()
            self._changed()
        elif self._is_stale(version):
            version = self._registry.renew(version)
            self._changed()
        version.bind(request, self._clock())
        # Those already refused room come first, which `admit`, in the policy's order, sees to.
        if not self._in_memory(version) and not self._residency.any_short:
            self._start_load(version, LEAST_URGENT)

    def _in_memory(self, version: AdapterVersion) -> bool:
        return version.digest is not None and version.digest in self._residency.host

    def _is_stale(self, version: AdapterVersion) -> bool:
        """Whether the files are another content than the one that was read, and not in memory any more."""
        if version.digest is None or version.loading or self._in_memory(version):
            return False
        return self._files.changed(version.source, version.fingerprint)

    def admit(self, request: Request) -> str | None:
        """Let a request run: its rows are on the device and stay until `release` or `forget`.

        Returns:
            None when admitted (again, too, without effect), else why it must wait: "adapter_loading" or "adapter_rows".

        Raises:
            AdapterError: the adapter cannot be loaded; the request is forgotten.
        """
        version: AdapterVersion | None = request.adapter
        if version is None or request in version.running:
            return None
        self._poll()
        refusal = self._refusals.get(version)
        if refusal is not None and request.order >= refusal.order:
            return refusal.reason
        if version.error is not None:
            self.forget(request)
            raise error_from_info(version.error)
        assert request in version.waiting, "the request was not resolved, or is forgotten"
        reason = self._blocked(request, version)
        if reason is not None:
            self._refusals[version] = _Refusal(request.order, reason)
            return reason
        version.start(request)
        assert version.digest is not None
        self._residency.pool.retain(version.digest)
        return None

    def _blocked(self, request: Request, version: AdapterVersion) -> str | None:
        """Bring the version onto the device, or say what is missing."""
        adapter = self._residency.host.get(version.digest) if version.digest is not None else None
        if adapter is None:
            first = version.first_waiting()
            if not self._start_load(version, first.order if first is not None else request.order):
                self._residency.set_short(version)
            return LOADING
        if self._residency.must_yield(request, version):
            return ROWS
        if not self._residency.place(adapter):
            self._residency.set_short(version)
            return ROWS
        if self._residency.clear_short(version):
            self._changed()  # others need not yield to it any more
        return None

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
            version.unbind(request)
            if not version.waiting:
                self._residency.clear_short(version)
            self._changed()

    def wait(self, timeout: float) -> None:
        """Block up to `timeout` seconds until a background load ends; return at once when none is under way."""
        for loaded in self._loader.wait(timeout):
            self._finish(loaded)

    # --- the runner's feature ---

    def prepare(self, rows: PlanRows) -> LoraBatch | None:
        """What the target's forward pass needs for rows of (request.adapter, number of tokens); None when all are the
        base model's. Every adapter named must be that of an admitted request."""
        return self._steps.prepare(rows)

    def prepare_head(self, rows: PlanRows) -> LoraBatch | None:
        """The same for rows of logits; None when no adapter of theirs targets lm_head."""
        return self._steps.prepare_head(rows)

    def prepare_draft(self, rows: PlanRows) -> LoraBatch | None:
        """The same for the drafter's passes; None when no adapter of theirs has draft weights."""
        return self._steps.prepare_draft(rows)

    def namespace(self, request: Request) -> bytes:
        """What keys an admitted request's cached prefixes: the digest of its adapter's content, b"" for the base."""
        version: AdapterVersion | None = request.adapter
        if version is None:
            return b""
        assert version.digest is not None, "the adapter has not been read yet"
        return version.digest

    def close(self) -> None:
        """Stop the loader thread."""
        self._loader.close()

    def check_integrity(self) -> None:
        """Rows, tiers, versions and requests agree."""
        self._registry.check_integrity()
        self._residency.check_integrity()

    # --- loads ---

    def _make_room(self, claim: Order) -> bool:
        return self._residency.make_room(claim, self._loader.num_in_flight)

    def _start_load(self, version: AdapterVersion, claim: Order) -> bool:
        """Load the version in the background, for a request as urgent as `claim`; False without room for it."""
        if version.loading:
            return True
        if not self._make_room(claim):
            return False
        version.loading = True
        self._residency.clear_short(version)
        self._loader.submit(version, version.source)
        return True

    def _poll(self) -> None:
        for loaded in self._loader.poll():
            self._finish(loaded)

    def _finish(self, loaded: Loaded[AdapterVersion]) -> None:
        """A background load has ended: fill the host tier, or give the version's requests its error."""
        version, adapter, error = loaded.ticket, loaded.adapter, loaded.error
        version.loading = False
        self._load_seconds.append(loaded.seconds)
        if adapter is not None and version.digest not in (None, adapter.digest):
            adapter, error = None, adapter_error(f"the files of adapter '{version.name}' changed on disk; try again")
        if adapter is not None:
            self._take_content(version, adapter)
            self._residency.host.put(adapter)
            self._registry.succeed(version)
        else:
            assert error is not None
            version.error = error.info()
            self._registry.fail(version)
        self._residency.update_pins()
        self._changed()

    def _take_content(self, version: AdapterVersion, adapter: Adapter) -> None:
        if version.digest is None and adapter.draft not in ("", LOADED):
            logger.warning("adapter %r is served without its draft weights: %r", version.name, adapter.draft)
        version.take_content(adapter)

    def _changed(self) -> None:
        """Something may be possible that was refused before. Also drops what no version needs any more."""
        self._refusals.clear()
        self._residency.changed()
        for version in self._registry.collect():
            if version.digest is not None and not self._registry.has_digest(version.digest):
                self._residency.drop(version.digest)
                self._on_gone(version.digest)
