"""Rank 0 of several: sends each pass to the others, then computes its share of it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ....lora.device.layout import PackedModules
from ....lora.device.pool import Allocation
from ....models.batch import AdapterPreparer, LayerKV, SequenceRows, build_batch
from ....models.model import DecoderOutput, LanguageModel
from ....models.states.memory import LayerStates, release_states
from ...core.batch import Move
from ...core.config import EngineConfig
from ...core.errors import EngineDeadError, ErrorInfo, InvalidRequestError, error_from_info, invalid
from ...core.wire import receive, send
from .base import Handles
from .captured import TargetPasses
from .launch import LOAD_TIMEOUT, Launch, ProcessLaunch
from .messages import Message, RankSpec, encode_packed, encode_rows, send_message

if TYPE_CHECKING:
    from ....models.checkpoint.weight_update import WeightUpdate
    from .collectives import ProcessRanks

_START_SECONDS = 300.0
"""Longest time until a rank has imported what it needs."""
_JOIN_SECONDS = 180.0
"""Longest time until all started ranks have found each other; on GPUs they load NCCL, too."""
_GLANCE_SECONDS = 0.2
"""Interval between two checks whether this process has joined the group."""


class ParallelExecutor:
    """Computes the target with other ranks. Implements `Executor`; `load` the model, then `bind` its memory.

    After an error in a pass, or an interrupt, the ranks' states differ: it kills all of them.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the ranks; they load their shares while this process loads its own.

        Raises:
            InvalidRequestError: there are too few devices, or Ray is not installed. EngineDeadError: a rank ended.
        """
        self._size = config.num_ranks
        self._failure: ErrorInfo | None = None
        self._lock = threading.Lock()  # adapters are written by other threads than the one that steps
        self._sockets = select.poll()
        self._launch = _launch(config)
        self._remote = self._launch.remote
        self._closed = weakref.finalize(self, self._launch.close)
        try:
            self._ranks = self._join(config)
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> ProcessRanks:
        """This process among the ranks."""
        return self._ranks

    @property
    def num_local(self) -> int:
        """Ranks on this machine, which share its cores."""
        return self._launch.sites[0].num_local

    def _join(self, config: EngineConfig) -> ProcessRanks:
        from .collectives import ProcessRanks  # only this needs torch.distributed

        for rank, remote in enumerate(self._remote, 1):
            site = self._launch.sites[rank]
            spec = RankSpec(
                rank=rank,
                size=self._size,
                store=self._launch.store,
                address=site.address,
                path=config.model,
                dtype=config.dtype,
                device=config.device,
                device_index=site.device_index,
                load_format=config.load_format,
                quantization=config.quantization,
                seed=config.seed,
                num_threads=site.num_threads,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            send(remote.link, spec)
        self._await("start", _START_SECONDS)
        site, joined = self._launch.sites[0], Future[ProcessRanks]()

        def join() -> None:
            try:
                if config.device == "cuda":
                    torch.cuda.set_device(site.device_index)
                joined.set_result(ProcessRanks(self._launch.open_store(), 0, self._size, config.device, site.address))
            except BaseException as error:
                joined.set_exception(error)

        # A group waits minutes for a rank that dies now, and that wait cannot be cancelled; the sockets show it at
        # once. A rank that cannot join has reported it before, so this thread and its descriptors are not left behind.
        threading.Thread(target=join, name="outrider-join", daemon=True).start()
        self._await("join the others", _JOIN_SECONDS, joined)
        try:
            return joined.result(_GLANCE_SECONDS + _JOIN_SECONDS / 10)  # the others have joined this process
        except (RuntimeError, OSError) as error:
            raise EngineDeadError(
                f"tensor_parallel_size {self._size}: rank 0 did not join the others: {error!r}"
            ) from error

    def _await(self, what: str, seconds: float, own: Future[Any] | None = None) -> list[dict[str, Any]]:
        """Wait until each rank has reported that it did `what`, or until `own`, this process's own part, fails.

        Raises:
            EngineDeadError: a rank ended, or did not do it in time. Or the error that a rank has sent.
        """
        said: dict[int, dict[str, Any]] = {}
        ends = time.monotonic() + seconds
        while missing := [rank for rank in range(1, self._size) if rank not in said]:
            has_failed = own is not None and own.done() and own.exception() is not None
            if has_failed:  # maybe for a reason that another rank is about to report
                ends = min(ends, time.monotonic() + 1.0)
            if time.monotonic() > ends:
                if has_failed:
                    break
                raise EngineDeadError(
                    f"tensor_parallel_size {self._size}: ranks {missing} did not {what} within {seconds:.0f} s"
                )
            links = {self._remote[rank - 1].link.fileno(): rank for rank in missing}
            sockets = select.poll()  # unlike `select` for any descriptor
            for link in links:
                sockets.register(link, select.POLLIN)
            for link, _ in sockets.poll(1000 * _GLANCE_SECONDS):
                said[links[link]] = self._receive(links[link])
        return [said[rank] for rank in sorted(said)]

    def _receive(self, rank: int) -> dict[str, Any]:
        """Report of a rank; its error is raised."""
        remote = self._remote[rank - 1]
        try:
            said: dict[str, Any] = receive(remote.link)[0]
        except (EOFError, OSError) as error:
            how = f"rank {rank} of {self._size} ended while it started: {remote.ended()}"
            raise EngineDeadError(how) from error
        if "error" in said:
            raise error_from_info(ErrorInfo(*said["error"]))
        return said

    def bind(
        self,
        model: LanguageModel,
        kv: Sequence[LayerKV],
        preparers: tuple[AdapterPreparer, AdapterPreparer],
        config: EngineConfig,
        num_lora_rows: int,
        passes: TargetPasses | None,
        states: Sequence[LayerStates],
    ) -> None:
        """Set this process's share and its memory, and have the other ranks allocate theirs.

        Args:
            model: This rank's model.
            kv: Its layers of the cache.
            preparers: Of the adapters of tokens, and of rows of logits.
            config: The engine's configuration.
            num_lora_rows: Rank rows of the adapters; not used without adapters.
            passes: Captured passes, which the other ranks capture, too; None: nothing is captured.
            states: Memory of its layers with a recurrent state.
        """
        self._model, self._kv, self._states, self._passes = model, kv, states, passes
        self._prepare, self._prepare_head = preparers
        self.weight_bytes = sum(
            said["weight_bytes"] for said in self._await("load its weights", LOAD_TIMEOUT.total_seconds())
        )
        """Bytes of the other ranks' weights."""
        cache, lora = config.cache, None
        if config.lora is not None:
            lora = [num_lora_rows, config.lora.max_lora_rank]
        watched = select.poll()
        for remote in self._remote:
            for sockets in (self._sockets, watched):
                sockets.register(remote.link, select.POLLIN)
        threading.Thread(target=_end_waits, args=[watched, self._ranks], name="outrider-ranks", daemon=True).start()
        graphs = None if passes is None else [list(passes.aux_layers), *passes.limits]
        num_slots = cache.states.num_slots if cache.states is not None else 0
        sizes = [cache.num_blocks, cache.block_size, cache.dtype, num_slots]
        self._announce(Message("allocate", [*sizes, lora, cache.num_host_blocks, graphs]))

    def as_target(self, model: LanguageModel) -> LanguageModel:
        """The whole target, as drafters see it."""
        return cast(LanguageModel, SharedTarget(model, self))

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, rows: SequenceRows, handles: Handles, aux_layers: Sequence[int]) -> DecoderOutput:
        """See `Executor`."""
        assert rows.overshoot is None, "steps do not overlap"
        batch = build_batch(rows, self._model, self._kv, self._prepare(handles), self._states)
        token_ids = batch.input_ids.tolist() if rows.device_tokens else rows.token_ids
        lengths, array = encode_rows(rows, token_ids)
        with self._together(Message("forward", [lengths, _plain(handles), list(aux_layers)], [array])):
            return self._model.forward(batch, aux_layers)

    def replay(self, rows: SequenceRows, handles: Handles, *, verifies: bool) -> tuple[Tensor, ...] | None:
        """See `Executor`. All ranks hold the same graphs, since they agreed on each capture."""
        if self._passes is None:
            return None
        assert rows.overshoot is None, "steps do not overlap"
        with contextlib.ExitStack() as replaying:

            def begin() -> None:
                lengths, array = encode_rows(rows, rows.known_tokens(self._model.device))
                message = Message("replay", [lengths, _plain(handles), verifies], [array])
                replaying.enter_context(self._together(message))

            return self._passes.run(rows, handles, verifies=verifies, begin=begin)

    def announce_captures(self) -> None:
        """See `Executor`."""
        self._announce(Message("capture"))

    def logits(self, hidden: Tensor, handles: Handles) -> Tensor:
        """See `Executor`."""
        adapters = self._prepare_head(handles)
        with self._together(Message("logits", [len(hidden), _plain(handles)])):
            return self._model.compute_logits(self._ranks.copy_first(hidden.contiguous()), adapters)

    def lookup(self, input_ids: Tensor) -> Tensor:
        """The target's embeddings [T, H] of token ids [T], without adapters."""
        with self._together(Message("lookup", [len(input_ids)])):
            return self._model.embedding.lookup(self._ranks.copy_first(input_ids.contiguous()))

    def write_adapter(self, allocation: Allocation, packed: PackedModules) -> None:
        """Have the other ranks write their shares of an adapter; callable from any thread."""
        facts, arrays = encode_packed(packed)
        self._announce(Message("write", [allocation.key.hex(), allocation.rows, facts], arrays))

    def free_adapter(self, allocation: Allocation) -> None:
        """Have the other ranks drop an adapter, whose rows are free. If they are gone, the next step raises."""
        with contextlib.suppress(EngineDeadError):
            self._announce(Message("free", [allocation.key.hex(), allocation.rows]))

    def move_blocks(self, moves: Sequence[Move]) -> None:
        """Have the other ranks copy their shares of KV blocks between device and host."""
        self._announce(Message("move", [list(move) for move in moves]))

    def release_memory(self) -> None:
        """See `Executor`."""
        release_states(self._states)
        self._announce(Message("release"))

    def update_weights(self, sources: Sequence[Path], check: Callable[[], WeightUpdate]) -> WeightUpdate:
        """Replace all ranks' weights by those in `sources`, if every rank accepts them. All have replaced theirs when
        this returns.

        Args:
            check: Returns the update of this rank's share.

        Raises:
            Exception: `check` raised it, or another rank refused (InvalidRequestError). Nothing has changed.
            EngineDeadError: a rank failed in the middle.
        """
        found: WeightUpdate | None = None
        refusal: Exception = invalid("path", "is refused by another rank, whose log has the reason")
        with self._together(Message("update", [str(source.resolve()) for source in sources])):
            try:
                found = check()
            except Exception as error:
                refusal = error
            if self._ranks.agree(found is not None, LOAD_TIMEOUT):
                assert found is not None
                found.apply()
                self._ranks.agree(True, LOAD_TIMEOUT)
                return found
        raise refusal

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """True if a rank is gone, or something has failed; also while nothing is computed."""
        # The ranks send nothing after their start: a readable socket is closed.
        if self._failure is None and self._remote and self._sockets.poll(0):
            self._fail(None)
        return self._failure is not None

    def error(self) -> EngineDeadError:
        """See `Executor`."""
        assert self._failure is not None
        return EngineDeadError(self._failure.message)

    @contextlib.contextmanager
    def _together(self, message: Message) -> Iterator[None]:
        """Send a message to the ranks, and kill all of them if this process fails in its share."""
        self._announce(message)
        try:
            yield
        except BaseException as error:
            ended = self._fail(error)
            if isinstance(error, Exception):
                raise ended from error
            raise

    def _announce(self, message: Message) -> None:
        with self._lock:
            if self._failure is not None:
                raise self.error()
            try:
                for remote in self._remote:
                    send_message(remote.link, message)
            except Exception as error:
                raise self._fail(error) from error
            except BaseException as error:  # an interrupt may have cut a message
                self._fail(error)
                raise

    def _fail(self, error: BaseException | None) -> EngineDeadError:
        """Kill all ranks; returns the error, which names the first one to fail."""
        if self._failure is None:
            why = f"{type(error).__name__}: {error}" if error is not None else "its socket is closed"
            what = [
                f"rank {rank} of {self._size} is gone ({how})"
                for rank, remote in enumerate(self._remote, 1)
                if (how := remote.ended()) is not None
            ]
            if error is not None or not what:
                what.append(f"a step over {self._size} ranks failed ({why})")
            self._failure = EngineDeadError(f"tensor parallelism: {'; '.join(what)}").info()
            self.close()
        return self.error()

    def close(self) -> None:
        """See `Executor`."""
        self._closed()


class SharedTarget:
    """The target as a drafter of rank 0 sees it, with embeddings and head computed by all ranks."""

    def __init__(self, model: LanguageModel, executor: ParallelExecutor) -> None:
        self.config = model.config
        self.device = model.device
        self.embedding = self
        self._executor = executor

    def lookup(self, input_ids: Tensor, adapters: Any = None) -> Tensor:
        """See `Embedding.lookup`."""
        assert adapters is None, "drafts use the base model's embeddings"
        return self._executor.lookup(input_ids)

    def compute_logits(self, hidden: Tensor, adapters: Any = None, out: Tensor | None = None) -> Tensor:
        """See `LanguageModel`."""
        assert adapters is None, "drafts use the base model's head"
        assert out is None, "there are no graphs"
        return self._executor.logits(hidden, [(None, len(hidden))])


def _plain(handles: Handles) -> list[list[Any]]:
    """Handles of adapters as values of JSON."""
    return [
        [None, False, False, count]
        if version is None
        else [version.digest.hex(), version.targets_head, version.targets_experts, count]
        for version, count in handles
    ]


def _end_waits(sockets: select.poll, ranks: ProcessRanks) -> None:
    """Wait until a rank is gone, or all are stopped; then end this process's waits for it."""
    sockets.poll()
    ranks.abort()


def _launch(config: EngineConfig) -> Launch:
    """Start the other ranks as the options say."""
    if config.executor_backend != "ray":
        return ProcessLaunch(config)
    if importlib.util.find_spec("ray") is None:
        raise InvalidRequestError(
            "distributed_executor_backend ray needs pip install 'outrider[ray]'", param="distributed_executor_backend"
        )
    from .ray_launch import RayLaunch

    return RayLaunch(config)
