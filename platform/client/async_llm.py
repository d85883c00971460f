"""`AsyncLLM`: generation for asyncio, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import uuid
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, Unpack, cast

from ..core.compat.foreign_options import take_foreign
from ..core.compat.vllm_python import GENERATE
from ..core.config import EngineArgs
from ..core.errors import EngineDeadError, InvalidUserInputError, OutriderError, ShuttingDownError
from ..core.lora_request import LoRARequest
from ..core.messages import AdapterInfo, EngineInfo, EngineRequest, EngineStats, TokenDelta
from ..core.outputs import RequestOutput
from ..core.sampling_params import SamplingParams
from .adapters.client_adapters import AdapterClient
from .adapters.sources import AdapterSources
from .adapters.spelling import AnyLoRA, resolve_lora
from .engine_factory import demo_lora_requests, engine_args, import_text_side, load_text_side
from .input_processor import Defaults, InputProcessor, Prompt, RequestOptions, check_request_id, is_long, text_of
from .output_processor import OutputProcessor, RequestState
from .process.event_loops import Done, in_event_loop, run_in
from .process.ipc import Abort, Add
from .process.supervisor import Callbacks, EngineSpec, Supervisor
from .sampling_defaults import SamplingDefaults
from .shared_prefixes import SharedPrefixes
from .stream_pacing import News

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Generates text from asyncio; all calls belong to one event loop.

        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=20), delta=True):
                print(output.outputs[0].text, end="")

    Options are those of `EngineArgs`, by keyword; `AsyncLLM()` is the embedded demo model. When the engine process
    dies, running requests fail with EngineDeadError, and it is started again; adapters that had been loaded are
    loaded again. `sources` says where adapters may come from beside folders, the hub and object stores.
    """

    def __init__(self, model: str | None = None, *, sources: AdapterSources | None = None, **options: Any) -> None:
        self._start_with(EngineSpec(args=engine_args("AsyncLLM", model, options)), sources)

    @classmethod
    def from_engine_args(cls, args: EngineArgs, sources: AdapterSources | None = None) -> Self:
        """An AsyncLLM for these options."""
        return cls.from_spec(EngineSpec(args=args), sources)

    @classmethod
    def from_spec(cls, spec: EngineSpec, sources: AdapterSources | None = None) -> Self:
        """An AsyncLLM with another engine, or another policy for restarts."""
        self = cls.__new__(cls)
        self._start_with(spec, sources)
        return self

    def _start_with(self, spec: EngineSpec, sources: AdapterSources | None) -> None:
        self._args = spec.args
        self.sources = sources if sources is not None else AdapterSources()
        args = self._args
        self.sampling_defaults = SamplingDefaults(args.generation_config, self.sources, args.override_generation_config)
        """Sampling parameters of requests that leave them out."""
        self._adapters = AdapterClient(lambda: self._supervisor.ready_engine(), self.sources)
        self._supervisor = Supervisor(
            spec,
            Callbacks(on_deltas=self._on_deltas, on_death=self._on_death, on_restart=self._adapters.load_again),
        )
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._ending: asyncio.Future[None] | Done | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that all calls belong to
        self._draining = self._closed = False
        self._numbers = itertools.count()  # of the requests, for their ids in the engine
        # Threads that check long requests in Python: the event loop waits its turn behind each that runs.
        self._checkers = ThreadPoolExecutor(2, "check-request")
        self._info: EngineInfo | None = None
        self._input_processor: InputProcessor | None = None
        self._output_processor: OutputProcessor | None = None
        self._news = News()
        self._demo_adapters: dict[str, LoRARequest] = {}

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the engine process and wait until it is ready; once, however often it is called.

        Raises:
            OutriderError: the typed error of the engine that could not start.
            ShuttingDownError: after `shutdown`.
            InvalidUserInputError: in another event loop than the first time.
        """
        if self._closed:
            raise ShuttingDownError("this AsyncLLM has been shut down; make a new one")
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.create_task(self._start())
        self._check_loop()
        return await asyncio.shield(self._starting)

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise InvalidUserInputError(
                "this AsyncLLM belongs to another event loop, such as that of an earlier asyncio.run; make a new one"
            )

    async def _start(self) -> EngineInfo:
        # The tokenizer's library takes a second to import: meanwhile the engine starts.
        importing = asyncio.create_task(asyncio.to_thread(import_text_side, self._args))
        try:
            info = await self._supervisor.start()
        finally:
            await asyncio.wait({importing})
        try:
            tokenizer, eos_token_ids = await asyncio.to_thread(load_text_side, self._args, info)
            self.sampling_defaults.read_model(info.model)
        except BaseException:
            await self._supervisor.stop()
            raise
        self._input_processor = InputProcessor(tokenizer, info, eos_token_ids)
        self._output_processor = OutputProcessor(tokenizer)
        self._demo_adapters = demo_lora_requests(self._args)
        self._news.shares_cores = info.device == "cpu"
        self._info = info
        return info

    @property
    def state(self) -> str:
        """ "starting", "ready", "restarting", "draining" or "stopped"."""
        if self._draining and self._supervisor.state != "stopped":
            return "draining"
        if self._supervisor.state == "ready" and self._info is None:
            return "starting"  # the tokenizer is being loaded
        return self._supervisor.state

    @property
    def failure(self) -> OutriderError | None:
        """Why the engine has been given up; None while it has not."""
        return self._supervisor.failure

    @property
    def num_restarts(self) -> int:
        """How often the engine has been started again."""
        return self._supervisor.num_restarts

    @property
    def engine_pid(self) -> int | None:
        """Id of the engine process that runs now."""
        return self._supervisor.pid

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._news)

    @property
    def info(self) -> EngineInfo:
        """Model, dtype and limits of the engine. EngineDeadError before the first start."""
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def input_processor(self) -> InputProcessor:
        """Prompts to requests. EngineDeadError before the first start."""
        if self._input_processor is None:
            raise EngineDeadError("the engine has not started")
        return self._input_processor

    @property
    def output_processor(self) -> OutputProcessor:
        """The engine's tokens to outputs. EngineDeadError before the first start."""
        if self._output_processor is None:
            raise EngineDeadError("the engine has not started")
        return self._output_processor

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. EngineDeadError before the first start."""
        return self.input_processor.tokenizer

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests (ShuttingDownError) and wait at most `timeout` seconds for the running ones.

        Returns whether all have finished.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._news.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def shutdown(self) -> Awaitable[None]:
        """Fail what still runs with ShuttingDownError and end the engine process. May be called twice.

        In an event loop the result may be awaited, until the process has ended, but need not be. Elsewhere the process
        has ended on return.
        """
        if in_event_loop() and not (self._loop is not None and self._loop.is_closed()):
            self._check_loop()
        self._draining = self._closed = True
        if self._ending is None or self._ending.done():
            self._ending = run_in(self._loop, self._shutdown)
        return self._ending

    async def _shutdown(self) -> None:
        self._on_death(ShuttingDownError("the server is shutting down"))
        await self._supervisor.stop()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    # --- generation -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        delta: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt, yielding outputs until one is finished. Leaving the iterator aborts the request.

        A consumer that is slower than the engine gets fewer, larger outputs; so do all when many are told of short
        steps (`news`).

        Args:
            lora_request: the adapter, or the name of one that has been loaded; with a scale as `(adapter, 0.5)`; a
                weighted sum as `[(a, 0.7), (b, 0.3)]`.
            delta: each output holds only what is new, of the sequences that have news; else everything so far.
            options: see `RequestOptions`; vLLM's other keywords (`vllm_python.GENERATE`) at values that change nothing.

        Raises:
            OutriderError: typed, at the first iteration when the request is wrong, later when it fails.
        """
        own = tuple(RequestOptions.__annotations__)
        take_foreign("AsyncLLM.generate()", cast(dict[str, Any], options), GENERATE, own)
        if self._draining:
            raise ShuttingDownError("the server is shutting down")
        await self.start()
        request_id = request_id if request_id is not None else f"req-{uuid.uuid4().hex}"
        check_request_id(request_id)
        # The engine gets an id that is never used again: it may still tell of an aborted request with the user's id.
        engine_id = f"{request_id}~{next(self._numbers)}"
        requests = await self._process(
            prompt, sampling_params, request_id=engine_id, lora_request=lora_request, **options
        )
        if self._draining:
            raise ShuttingDownError("the server is shutting down")
        engine = self._supervisor.ready_engine()
        assert self._output_processor is not None
        state = self._output_processor.add(request_id, requests, text_of(prompt))
        news = self._news.open(request_id)
        try:
            engine.send(Add(requests))
            while True:
                await news.wait()
                output = state.take(delta)
                if state.error is None:  # else that comes next
                    news.taken()
                if output.finished:
                    self._news.close(request_id, news)
                yield output
                if output.finished:
                    return
        finally:
            self._news.close(request_id, news)
            if not state.finished:
                self._send_aborts(self._output_processor.abort(request_id))

    async def _process(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str,
        lora_request: AnyLoRA | None,
        **options: Unpack[RequestOptions],
    ) -> list[EngineRequest]:
        # No copy: thousands may be registered.
        lora = resolve_lora(lora_request, lambda: ChainMap(self.adapters, self._demo_adapters))
        lora = await self._adapters.localize(lora)
        chosen = params if params is not None else Defaults(await self.sampling_defaults.of(lora))
        process = functools.partial(self.input_processor.process, request_id, prompt, chosen, lora=lora, **options)
        if is_long(prompt, params):
            return await asyncio.get_running_loop().run_in_executor(self._checkers, process)
        return process()

    def count_speculation(self, request_id: str) -> None:
        """Bring the counts of drafts in a running request's metrics up to date; its end does that by itself."""
        state = None if self._output_processor is None else self._output_processor.get(request_id)
        if state is not None:
            state.count_speculation()

    async def abort(self, request_id: str) -> None:
        """End a running request; its iterator gets a last output, with finish reason "abort". Ignores unknown ids."""
        if self._output_processor is not None:
            self._send_aborts(self._output_processor.abort(request_id))
            self._news.tell(request_id)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids:
            with contextlib.suppress(EngineDeadError, ShuttingDownError):  # then nothing is running
                self._supervisor.ready_engine().send(Abort(request_ids))

    # --- what the supervisor tells --------------------------------------------------------------------------------

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        if self._output_processor is None:
            return
        processed = self._output_processor.process(deltas)
        self._send_aborts(processed.aborts)
        self._news.tell_all(processed.touched)

    def _on_death(self, error: OutriderError) -> None:
        failed: list[RequestState] = [] if self._output_processor is None else self._output_processor.fail_all(error)
        for state in failed:
            self._news.tell(state.request_id)

    async def share_prefixes(self, prefixes: Iterable[Sequence[int]]) -> None:
        """From then on share the KV of these beginnings of prompts (token ids) among all tenants, and of no others.
        Requests with a `cache_salt` take no part. One call at a time. EngineDeadError before the first start."""
        built = await asyncio.to_thread(SharedPrefixes, prefixes, self.info.block_size)
        self.input_processor.shared_prefixes = built

    # --- adapters and statistics ----------------------------------------------------------------------------------

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """The adapters that `load_adapter` has registered, by name; those that could not be loaded again after a
        restart are no longer here."""
        return self._adapters.requests

    async def load_adapter(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False
    ) -> AdapterInfo:
        """Fetch, read, check and register an adapter; see `LLM.load_lora_adapter`."""
        await self.start()
        return await self._adapters.load(request, load_inplace=load_inplace, pinned=pinned)

    async def register_adapters(self, requests: Sequence[LoRARequest]) -> None:
        """Make adapters known by name, to be read when requests come; see `LLM.register_lora_adapters`."""
        await self.start()
        await self._adapters.register(requests)

    async def unload_lora(self, name: str, mode: str = "drain") -> None:
        """Forget an adapter; see `LLM.unload_lora`."""
        await self.start()
        await self._adapters.unload(name, mode)

    async def unload_adapter(self, name: str) -> None:
        """`unload_lora` that lets requests finish."""
        await self.unload_lora(name)

    async def pin_lora(self, name: str) -> None:
        """Keep an adapter on the device; see `LLM.pin_lora`."""
        await self.start()
        await self._adapters.set_pinned(name, True)

    async def unpin_lora(self, name: str) -> None:
        """Let an adapter go when others need its place; NotFoundError when it is not registered."""
        await self.start()
        await self._adapters.set_pinned(name, False)

    async def list_adapters(self) -> list[AdapterInfo]:
        """The registered adapters."""
        await self.start()
        adapters: list[AdapterInfo] = await self._adapters.call("list_adapters")
        return adapters

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters; they start anew when the engine has been started again."""
        await self.start()
        stats: EngineStats = await self._adapters.call("stats")
        return stats
