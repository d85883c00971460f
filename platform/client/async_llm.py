"""`AsyncLLM`: generation for asyncio, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import ChainMap
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack, cast

from ..core.config import EngineArgs
from ..core.errors import EngineDeadError, InvalidUserInputError, OutriderError, ShuttingDownError
from ..core.messages import EngineInfo, TokenDelta
from ..core.outputs import RequestOutput
from ..core.sampling_params import RequestOutputKind, SamplingParams
from .adapters.async_adapters import AsyncLLMAdapters
from .adapters.methods import AsyncAdapterMethods
from .adapters.sources import AdapterSources
from .adapters.spelling import AnyLoRA
from .beam_search import AsyncBeamSearch
from .engine_factory import MadeFromArgs, demo_lora_requests, import_text_side, load_text_side
from .engine_methods import AsyncEngineMethods
from .input_processor import InputProcessor, check_request_id, take_options
from .output_processor import OutputProcessor
from .pooling import AsyncPoolingMethods
from .prepared import ParsedPrompt, Prepared, RequestOptions
from .process.event_loops import Done, in_event_loop, run_in
from .process.ipc import Abort, Add
from .process.supervisor import EngineSpec, Supervisor
from .prompts import Prompt
from .requests import RequestMaker
from .sampling_defaults import SamplingDefaults
from .sleeping import AsyncSleepMethods
from .stream_pacing import StreamPacer
from .text.chat_template import ChatOptions
from .text.shared_prefixes import SharedPrefixes

logger = logging.getLogger(__name__)


class _Started(NamedTuple):
    """The parts that need the engine's model."""

    info: EngineInfo
    requests: RequestMaker
    output_processor: OutputProcessor


class AsyncLLM(
    MadeFromArgs, AsyncAdapterMethods, AsyncPoolingMethods, AsyncBeamSearch, AsyncEngineMethods, AsyncSleepMethods
):
    """Generates text from asyncio; all calls belong to one event loop.

        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=20), delta=True):
                print(output.outputs[0].text, end="")

    Options are those of `EngineArgs`, by keyword; `AsyncLLM()` is the embedded demo model. When the engine process
    dies, running requests fail with EngineDeadError, and it is started again; adapters that had been loaded are
    loaded again. `sources` says where adapters may come from beside folders, the hub and object stores.
    """

    adapters: AsyncLLMAdapters

    @classmethod
    def from_spec(cls, spec: EngineSpec, sources: AdapterSources | None = None) -> Self:
        """An AsyncLLM with another engine, or another policy for restarts."""
        self = cls.__new__(cls)
        self._start_with(spec, sources)
        return self

    def _set_up(self, args: EngineArgs, engine: str, sources: AdapterSources | None) -> None:
        self._start_with(EngineSpec(args=args, engine=engine), sources)

    def _start_with(self, spec: EngineSpec, sources: AdapterSources | None) -> None:
        self._args = args = spec.args
        self.sources = sources if sources is not None else AdapterSources()
        self.sampling_defaults = SamplingDefaults(args.generation_config, self.sources, args.override_generation_config)
        """Sampling parameters of requests that leave them out."""
        self.adapters = AsyncLLMAdapters(self.start, self._ready_engine, self.sources)
        self._make_supervisor = lambda: Supervisor(
            spec, on_deltas=self._on_deltas, on_death=self._on_death, on_restart=self.adapters.load_again
        )
        self._supervisor = self._make_supervisor()
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._ending: asyncio.Future[None] | Done | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that all calls belong to
        self._draining = self._closed = False
        self._numbers = itertools.count()  # of the requests, for their ids in the engine
        self._started: _Started | None = None
        self._pacer = StreamPacer()

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
        self._pacer.shares_cores = info.device == "cpu"
        known = ChainMap(self.adapters.requests, demo_lora_requests(self._args))
        input_processor = InputProcessor(tokenizer, info, eos_token_ids)
        requests = RequestMaker(input_processor, lambda: known, self.sources, self.sampling_defaults)
        self._started = _Started(info, requests, OutputProcessor())
        return info

    @property
    def state(self) -> str:
        """ "starting", "ready", "restarting", "sleeping", "draining" or "stopped"."""
        if self._draining and self._supervisor.state != "stopped":
            return "draining"
        if self._asleep and not self._closed:
            return "sleeping"
        if self._supervisor.state == "ready" and self._started is None:
            return "starting"  # the tokenizer is being loaded
        return self._supervisor.state

    @property
    def failure(self) -> OutriderError | None:
        """Reason why the engine has been given up; None while it has not."""
        return self._supervisor.failure

    @property
    def num_restarts(self) -> int:
        """Number of times that the engine has been started again."""
        return self._supervisor.num_restarts

    @property
    def engine_pid(self) -> int | None:
        """Id of the engine process that runs now."""
        return self._supervisor.pid

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._pacer)

    def _parts(self) -> _Started:
        if self._started is None:
            raise EngineDeadError("the engine has not started")
        return self._started

    @property
    def info(self) -> EngineInfo:
        """Model, dtype and limits of the engine. EngineDeadError before the first start, as of the following."""
        return self._parts().info

    engine_info = info

    @property
    def input_processor(self) -> InputProcessor:
        """Prompts to requests."""
        return self._parts().requests.input_processor

    def processor_of(self, lora: AnyLoRA | None) -> Awaitable[InputProcessor]:
        """See `RequestMaker.processor_of`."""
        return self._parts().requests.processor_of(lora)

    @property
    def output_processor(self) -> OutputProcessor:
        """The engine's tokens to outputs."""
        return self._parts().output_processor

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None under `skip_tokenizer_init`."""
        return self.input_processor.tokenizer

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests (ShuttingDownError) and wait at most `timeout` seconds for the running ones; True when
        all have finished."""
        self._draining = True
        try:
            await asyncio.wait_for(self._pacer.idle.wait(), timeout)
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
        error = ShuttingDownError("the server is shutting down")
        self._on_death(error)
        self.sources.fail_waiting(error)
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

        A consumer that is slower than the engine gets fewer, larger outputs; so do all when there are many and steps
        are short (`stream_pacing`).

        Args:
            lora_request: the adapter, or the name of one that has been loaded; with a scale as `(adapter, 0.5)`; a
                weighted sum as `[(a, 0.7), (b, 0.3)]`.
            delta: each output holds only what is new, of the sequences that have something new; else everything so far.
            options: see `RequestOptions`; vLLM's other keywords (`vllm_python.GENERATE`) at values that change nothing.

        Raises:
            OutriderError: typed, at the first iteration when the request is wrong, later when it fails.
        """
        take_options("AsyncLLM.generate()", options)
        prepared = await self.prepare(prompt, sampling_params, request_id, lora_request=lora_request, **options)
        async with contextlib.aclosing(self.run(prepared, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Prepared:
        """Tokenize and check a request, for `run`. Latencies are counted from `arrival_time` on the monotonic clock, by
        default from now. Errors are those of the first iteration of `generate`."""
        take_options("AsyncLLM.prepare()", options)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self._check_takes_requests()
        await self.start()
        request_id = request_id if request_id is not None else f"req-{uuid.uuid4().hex}"
        check_request_id(request_id)
        self.adapters.numbers.note(lora_request)
        return await self._parts().requests.prepare(
            prompt, sampling_params, request_id, lora_request=lora_request, arrival_time=arrival_time, **options
        )

    async def run(self, prepared: Prepared, *, delta: bool = False) -> AsyncGenerator[RequestOutput]:
        """Run a request; the outputs are those of `generate`. It may have waited: its adapter has the version, and the
        engine the state, of now."""
        request_id, kind = prepared.request_id, prepared.kind
        delta, at_end = delta or kind is RequestOutputKind.DELTA, kind is RequestOutputKind.FINAL_ONLY
        # The engine gets an id that is never used again: it may still tell of an aborted request with the user's id.
        requests = await self._parts().requests.sequences(prepared, f"{request_id}~{next(self._numbers)}")
        self._check_takes_requests()
        engine = self._ready_engine()
        state = self.output_processor.add(prepared, requests)
        consumer = self._pacer.open(request_id)
        try:
            engine.send(Add(requests))
            while True:
                await consumer.wait()
                if at_end and not state.finished:
                    consumer.taken()
                    continue
                output = state.take(delta)
                if state.error is None:  # else that comes next
                    consumer.taken()
                if output.finished:
                    self._pacer.close(request_id, consumer)
                yield output
                if output.finished:
                    return
        finally:
            self._pacer.close(request_id, consumer)
            if not state.finished:
                self._send_aborts(self.output_processor.abort(request_id))

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        delta: bool = False,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Generate the assistant's next turn of a conversation.

        `options` are those of `ChatOptions` and of `RequestOptions`; the rest is as in `generate`. The chat template in
        an adapter's folder takes the place of the model's.
        """
        await self.start()
        of_request = {name: options.pop(name) for name in RequestOptions.__annotations__ if name in options}
        prompt = await self._parts().requests.chat_prompt(messages, lora_request, cast(ChatOptions, options))
        prepared = await self.prepare(
            prompt, sampling_params, request_id, lora_request=lora_request, **cast(RequestOptions, of_request)
        )
        async with contextlib.aclosing(self.run(prepared, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    def count_speculation(self, request_id: str) -> None:
        """Bring the counts of drafts in a running request's metrics up to date; its end does that by itself."""
        state = None if self._started is None else self.output_processor.get(request_id)
        if state is not None:
            state.count_speculation()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a running request, or several; each iterator gets a last output, with finish reason "abort". Ignores
        unknown ids."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if self._started is not None:
                self._send_aborts(self.output_processor.abort(name))
                self._pacer.wake(name)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids:
            with contextlib.suppress(EngineDeadError, ShuttingDownError):  # then nothing is running
                self._supervisor.ready_engine().send(Abort(request_ids))

    async def share_prefixes(self, prefixes: Iterable[Sequence[int]]) -> None:
        """Share the KV of these beginnings of prompts (token ids) among all tenants from now on, and of no others.
        Requests with a `cache_salt` take no part. One call at a time. EngineDeadError before the first start."""
        processor = self.input_processor
        processor.shared_prefixes = await asyncio.to_thread(SharedPrefixes, prefixes, self.info.block_size)

    # --- what the supervisor tells --------------------------------------------------------------------------------

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        if self._started is None:
            return
        processed = self.output_processor.process(deltas)
        self._send_aborts(processed.aborts)
        self._pacer.wake_all(processed.touched)

    def _on_death(self, error: OutriderError) -> None:
        for state in [] if self._started is None else self.output_processor.fail_all(error):
            self._pacer.wake(state.request_id)
