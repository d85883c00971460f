"""The engine: sequences in, tokens out, one step at a time."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, NoReturn
from uuid import uuid4

import torch

from ...kernels.memory import release_pages
from ...models.model import LanguageModel
from ..core.config import EngineArgs
from ..core.errors import (
    InvalidRequestError,
    InvalidUserInputError,
    OverloadedError,
    ShuttingDownError,
    invalid,
)
from ..core.kv_events import KVEventSource
from ..core.memory_usage import resident_memory_bytes
from ..core.messages import MAX_TENANT_WEIGHT, EngineInfo, EngineRequest, EngineStats, TokenDelta
from ..core.model_limits import MAX_TOKEN_IDS, check_context, check_params, check_token_ids
from ..core.request import Request
from ..core.sampling_params import check_number, check_text
from ..core.weight_source import WeightSource
from .adapters import EngineAdapters
from .kv_events import KVEvents
from .profiler import Profiler
from .runner.pipeline import Pipeline
from .sampling.logits_edits import EditTables, edit_state
from .setup import build
from .speculation_totals import SpeculationTotals

_FREED = tuple(
    "scheduler adapters _runner _executor _adapters _grammars _kv _host _pipeline _profiler _edit_tables"
    " learner _weights".split()
)
"""Attributes that hold the engine's memory, which `shutdown` drops."""


class EngineCore:
    """Owns the scheduler, the runner and the features. Not thread-safe: one thread calls it."""

    def __init__(self, args: EngineArgs, *, progress: bool = False) -> None:
        """Load the model and allocate the KV cache; see `setup.build` for the errors."""
        self._kv_events = KVEvents(args)  # before the model is loaded, which takes long
        try:
            parts = build(args, progress=progress)
        except BaseException:
            self._kv_events.close()
            raise
        self._kv_events.record(parts.scheduler.prefix_cache)
        self.info: EngineInfo = parts.info
        self.scheduler = parts.scheduler
        self._config = parts.config
        self._runner = parts.runner
        self._executor = parts.executor
        self._adapters = parts.adapters
        self._grammars = parts.grammars
        self._kv = parts.kv
        self._host = parts.host
        self.learner = parts.learner
        """Trains draft weights of tenants that opted in; None: none did."""
        self._learns = True  # False while it sleeps
        self._num_added = 0
        self._random = random.Random(args.seed)
        self._run_id = uuid4().hex
        self.adapters = EngineAdapters(parts.adapters.catalog, parts.scheduler)
        """Loads, unloads and pins adapters; see `core.adapter_verbs`."""
        self._pipeline = Pipeline(parts.scheduler, parts.runner, self._wait)
        self._pause = parts.pause
        self._weights = parts.weights
        self._speculation = SpeculationTotals()
        self._profiler = Profiler()
        self._edit_tables: EditTables | None = None  # of the last request that had some: its sequences share them

    @property
    def model(self) -> LanguageModel:
        """The target."""
        return self._runner.model

    def step(self) -> list[TokenDelta]:
        """Compute one step of the scheduled sequences. Errors of single sequences are deltas; others continue.
        With `async_scheduling` the next step is in flight when this returns.

        Raises:
            EngineDeadError: another rank is gone, or the weights are not whole; every further step raises it too.
        """
        if self._weights.failure is not None:
            raise self._weights.failure
        if self._executor.is_broken:
            raise self._executor.error()
        if self._pause.is_frozen:
            return self._pipeline.flush()
        try:
            with _collector_paused():
                deltas = self._pipeline.step()
                self._pause.observe(self.scheduler, self._pipeline)
        except Exception as error:
            if self._executor.is_broken:
                raise self._executor.error() from error
            raise
        if self._executor.is_broken:  # maybe since the middle of a pass, whose results are unknown then
            raise self._executor.error()
        self._kv_events.flush()
        self.learn()
        return deltas

    def learn(self) -> float | None:
        """Train drafts for at most one slice, if few requests run and none waits. To be called again and again while
        there is no work.

        Returns:
            Seconds until the next slice may start; None: there is nothing to train now.
        """
        if self.learner is None or not self._learns or self._pause.is_on or self.scheduler.num_waiting:
            return None
        if self.scheduler.num_running > self.learner.max_running:
            return None
        return self.learner.work()

    def has_work(self) -> bool:
        """True if `step` would do work or raise."""
        has_rows = self.scheduler.has_ended if self._pause.is_frozen else self.scheduler.has_work()
        has_failed = self._executor.is_broken or self._weights.failure is not None
        return has_rows or has_failed or not self._pipeline.is_idle

    def add_request(self, request: EngineRequest) -> None:
        """Queue a sequence.

        Raises:
            PromptTooLongError, InvalidRequestError, AdapterError, NotFoundError, OverloadedError: it is refused; other
            sequences are unaffected.
        """
        self._check(request)
        self._learns = True
        self._num_added += 1
        seed = request.params.seed
        sequence = Request(
            request_id=request.request_id,
            tokens=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            params=request.params,
            seed_key=self._random.getrandbits(64) if seed is None else _seed_key(seed),
            eos_token_ids=frozenset(request.eos_token_ids),
            lora=request.lora,
            cache_salt=request.cache_salt,
            sharing=self._sharing(request),
            num_shared_tokens=self._num_shared(request),
            text_namespace=(_joined(request.tenant, request.cache_salt), b""),
            group=request.group,
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            arrival_time=request.arrival_time,
        )
        self._adapters.resolve(sequence)
        if sequence.sampling.edits_logits:
            self._edit_tables = edit_state(sequence, self._edit_tables).tables
        if self._config.speculative is not None and request.params.max_drafts != 0:
            name = request.lora.label if request.lora is not None else ""
            sequence.speculation_totals = self._speculation.of(name, request.tenant)
        self.scheduler.add(sequence)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these sequences; unknown ids are ignored and no delta follows."""
        self.scheduler.abort(request_ids)
        self._pause.observe(self.scheduler, self._pipeline)
        self._kv_events.flush()

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Pause: see `engine.pause` for the modes. `clear_cache`: new weights drop all KV, and preempt sequences that
        are kept. In the mode "wait" steps continue until `has_work` is False.

        Raises:
            InvalidRequestError: there is no such mode.
        """
        self._pause.begin(mode, self.scheduler, self._pipeline, drops_kv=clear_cache)
        self._kv_events.flush()

    def resume(self) -> None:
        """End the pause, if there is one."""
        self._pause.end()

    def update_weights(self, sources: Sequence[WeightSource], *, draft: bool = False) -> bool:
        """Replace weights of the target, or with `draft` of the drafter. Requests do not find cached KV of the old
        weights any more, target's or drafter's. Sequences that a pause keeps continue with it if its `clear_cache` was
        False.

        Returns:
            False if the target keeps some of its weights.

        Raises:
            InvalidRequestError, NotFoundError: see `Weights.update`; nothing has changed.
            InvalidUserInputError: sequences run: the engine must be paused; or see `Weights.update`.
            EngineDeadError: a replacement failed in the middle.
        """
        self._pipeline.settle()
        if not self._pause.is_frozen and (self.scheduler.num_running or self.scheduler.num_waiting):
            raise InvalidUserInputError("requests are running: pause generation before the weights change")
        is_whole = self._weights.update(sources, draft=draft)
        if self._pause.drops_kv:
            self.scheduler.drop_kv()
        self.scheduler.forget_kv()
        self._kv_events.flush()
        return is_whole

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        cache, adapters = self.scheduler.prefix_cache, self._adapters.catalog.stats()
        return EngineStats(
            run_id=self._run_id,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_waiting_by_reason=self.scheduler.waiting_by_reason(),
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._pipeline.num_steps,
            resident_memory_bytes=resident_memory_bytes(),
            kv_cache_usage=self.scheduler.pool.usage,
            prefix_cache_queries=cache.num_queries,
            prefix_cache_hits=cache.num_hits,
            kv_host_hits=cache.host.num_hits * cache.block_size if cache.host is not None else 0,
            kv_host_bytes=cache.host.num_bytes if cache.host is not None else 0,
            kv_event_batches=self._kv_events.num_batches,
            kv_event_batches_dropped=self._kv_events.num_dropped,
            drafters=[] if self._config.speculative is None else list(self._config.speculative.drafters),
            speculation=self._speculation.entries(),
            learning=[] if self.learner is None else self.learner.states(),
            adapters=adapters.adapters,
            running_adapters=adapters.running,
            waiting_adapters=adapters.waiting,
            num_adapters=adapters.num_adapters,
            lora_load_seconds=adapters.load_seconds,
            lora_host_bytes=adapters.host_bytes,
            lora_load_failures=adapters.load_failures,
            lora_evictions={"device": adapters.device_evictions, "host": adapters.host_evictions},
            lora_transfers=list(adapters.transfers),
            lora_rows_used=adapters.rows_used,
            lora_rows=adapters.num_rows,
        )

    def start_profile(self, folder: str, prefix: str) -> None:
        """Record steps with torch's profiler, for files in `folder`; see `Profiler.start` for the errors."""
        self._profiler.start(folder, prefix)

    def stop_profile(self) -> str:
        """Write the profile; returns the path of its trace. See `Profiler.stop` for the errors."""
        return self._profiler.stop()

    def reset_prefix_cache(self) -> bool:
        """Drop the cached KV that no sequence uses; True when the cache is empty."""
        is_empty = self.scheduler.prefix_cache.reset()
        self._kv_events.flush()
        return is_empty

    def kv_event_sources(self) -> list[KVEventSource]:
        """Addresses at which events of the KV cache are published; [] if they are not."""
        return self._kv_events.sources()

    def release_memory(self) -> None:
        """Return the memory of KV blocks, the host's too, to the system, on a CPU; it is allocated again at its next
        use. Drafts are not trained until the next request.

        Raises:
            InvalidUserInputError: there are sequences.
        """
        if self.scheduler.num_running or self.scheduler.num_waiting:
            raise InvalidUserInputError("the engine has sequences; it can sleep when they are finished")
        self._learns = False
        self._pipeline.abandon()  # rows of sequences that were aborted
        self.reset_prefix_cache()
        self._executor.release_memory()
        for part in (part for layer in self._kv for part in layer):
            release_pages(part)
        if self._host is not None:
            self._host.release_memory()

    def shutdown(self) -> None:
        """Abort unfinished sequences, stop background work and free all memory, even if this object is still
        referenced. Later calls that need the engine raise ShuttingDownError; a second shutdown does nothing."""
        if "_runner" not in vars(self):
            return
        device = self.model.device
        self.scheduler.abort([request.request_id for request in (*self.scheduler.running, *self.scheduler.waiting)])
        with ExitStack() as last_first:  # all of it, even if one fails
            last_first.callback(self._free, device)
            last_first.callback(self._kv_events.close)
            for part in (self._grammars, self._executor, self._adapters, self._runner, self._profiler):
                last_first.callback(part.close)
            last_first.callback(self._pipeline.abandon)

    def _free(self, device: torch.device) -> None:
        """Drop the attributes named by `_FREED`."""
        for name in _FREED:
            delattr(self, name)
        gc.collect()  # parts refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()

    if not TYPE_CHECKING:  # mypy finds attributes that do not exist

        def __getattr__(self, name: str) -> NoReturn:
            """Raise ShuttingDownError for attributes that `shutdown` has dropped."""
            if name in _FREED:
                raise ShuttingDownError("the engine is shut down")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def check_integrity(self) -> None:
        """Raise AssertionError unless all allocators agree with the sequences' blocks and rows."""
        self.scheduler.check_integrity()
        self._adapters.check_integrity()

    def _wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a grammar or an adapter, if one is loading."""
        if not self._grammars.wait(timeout):
            self._adapters.wait(timeout)

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self.scheduler:
            raise InvalidUserInputError(f"request id {request.request_id!r} is in use", param="request_id")
        length = len(request.prompt_token_ids)
        if length == 0:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        # A client has checked it, with `max_tokens`; benchmarks and users of `LLMEngine.engine_core` have no client.
        check_context(self.info.max_model_len, length, only_scores=request.params.only_scores)
        # An adapter may have more tokens; `Vocabularies` checks them when it has been read.
        num_ids = self.info.vocab_size if request.lora is None else MAX_TOKEN_IDS
        check_token_ids("prompt", request.prompt_token_ids, num_ids)
        check_token_ids("eos_token_ids", request.eos_token_ids, num_ids)
        check_params(request.params, self.info.vocab_size, self.info.max_logprobs, num_ids, self.info.num_labels)
        check_text("tenant", request.tenant)
        check_number("weight", request.weight, 1 / MAX_TENANT_WEIGHT, MAX_TENANT_WEIGHT)
        check_text("cache_salt", request.cache_salt)
        if not 0 <= request.num_shared_tokens <= length:
            raise invalid("num_shared_tokens", f"is {request.num_shared_tokens}, and the prompt has {length} tokens")
        queued = self._config.scheduler.max_num_queued_reqs
        seats = self._config.scheduler.max_num_seqs - self.scheduler.num_running
        if queued is not None and self.scheduler.num_waiting >= queued + seats:
            raise OverloadedError(f"{queued} requests are waiting already (max_num_queued_reqs)")

    def _sharing(self, request: EngineRequest) -> bytes | None:
        """Key of the sequences that may share this one's KV; None: no other may. Siblings (`n` > 1) always share, and a
        sequence shares with itself, if it may be swapped."""
        if self._config.cache.enable_prefix_caching:
            return _joined(request.tenant, request.cache_salt)
        if request.group is None:
            return _joined(request.tenant, "", "", str(self._num_added)) if self._host is not None else None
        return _joined(request.tenant, request.cache_salt, request.group)

    def _num_shared(self, request: EngineRequest) -> int:
        """Number of leading tokens whose KV all tenants share. None with a salt."""
        if request.cache_salt or not self._config.cache.enable_prefix_caching:
            return 0
        learn = None if self._config.speculative is None else self._config.speculative.learn
        if learn is not None and request.tenant in learn.tenants:
            return 0  # the blocks hold the drafter's KV too, which its learnt weights have changed
        return request.num_shared_tokens


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: a step creates thousands of objects that live until the next one, which would
    trigger collections, some of them of all objects of the process."""
    if not gc.isenabled():  # it is off already: by the user, or by another engine's step, which will turn it on
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _joined(*texts: str) -> bytes:
    """One key of several texts; lengths keep them apart, so that no two different lists join to the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in (text.encode() for text in texts))


def _seed_key(seed: int) -> int:
    """64 well-mixed bits for a user's seed, so that seeds 1 and 2 share nothing."""
    return int.from_bytes(blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest(), "little")
