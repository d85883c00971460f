"""`RequestStreams`: the requests of an `AsyncLLM`, from prompts to streams of outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import ChainMap
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack, cast

from ..core.beam_search import BeamSearchOutput, BeamSearchParams
from ..core.errors import EngineDeadError, OutriderError, ShuttingDownError
from ..core.lora_request import LoRARequest
from ..core.messages import EngineInfo, TokenDelta
from ..core.outputs import RequestOutput
from ..core.sampling_params import RequestOutputKind, SamplingParams
from .adapters.loaded_adapters import LoadedAdapters
from .adapters.lora_argument import AnyLoRA
from .adapters.sources import AdapterSources
from .beam_search import search_async, step_params
from .engine_factory import demo_lora_requests, load_text_side
from .input_processor import InputProcessor, check_request_id, take_options
from .output_processor import OutputProcessor
from .prepared import ParsedPrompt, Prepared, RequestOptions
from .process.supervisor import EngineProcess, EngineSpec
from .prompts import Prompt
from .remote_engine import RemoteEngine
from .requests import RequestMaker
from .sampling_defaults import SamplingDefaults
from .stream_pacing import StreamPacer
from .text.chat_template import ChatOptions
from .text.shared_prefixes import SharedPrefixes


class TextSide(NamedTuple):
    """The parts that need the engine's model."""

    requests: RequestMaker
    output_processor: OutputProcessor


class RequestStreams:
    """Makes the engine and its adapters, and receives what the engine sends. One event loop only."""

    def __init__(self, spec: EngineSpec, sources: AdapterSources, defaults: SamplingDefaults) -> None:
        self._args, self._sources, self._defaults = spec.args, sources, defaults
        self.pacer = StreamPacer()
        self.engine = RemoteEngine(
            spec,
            self.pacer,
            on_start=self._load_text_side,
            on_deltas=self._on_deltas,
            on_death=self._on_death,
            on_restart=self._on_restart,
        )
        self.adapters = LoadedAdapters(self.engine.start, self.engine.call, sources.localize, sources)
        self._numbers = itertools.count()  # of the requests, for their ids in the engine
        self._text_side: TextSide | None = None

    @property
    def text_side(self) -> TextSide:
        """Processors of requests and outputs. EngineDeadError before the first start."""
        if self._text_side is None:
            raise EngineDeadError("the engine has not started")
        return self._text_side

    # --- events of the engine -------------------------------------------------------------------------------------

    async def _load_text_side(self, info: EngineInfo) -> None:
        tokenizer, eos_token_ids = await asyncio.to_thread(load_text_side, self._args, info)
        self._defaults.read_model(info.model)
        self.pacer.shares_cores = info.device == "cpu"
        known = ChainMap(cast(dict[str, LoRARequest], self.adapters.requests), demo_lora_requests(self._args))
        input_processor = InputProcessor(tokenizer, info, eos_token_ids)
        requests = RequestMaker(input_processor, lambda: known, self._sources, self._defaults, self.adapters.requests)
        self._text_side = TextSide(requests, OutputProcessor())

    async def _on_restart(self, process: EngineProcess) -> None:
        await self.adapters.reload_after_restart(process.call)

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        if self._text_side is None:
            return
        processed = self._text_side.output_processor.process(deltas)
        self.engine.abort(processed.aborts)
        self.pacer.wake_all(processed.touched)

    def _on_death(self, error: OutriderError) -> None:
        if isinstance(error, ShuttingDownError):
            self._sources.fail_waiting(error)
        for state in [] if self._text_side is None else self._text_side.output_processor.fail_all(error):
            self.pacer.wake(state.request_id)

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        lora_request: AnyLoRA | None,
        delta: bool,
        options: RequestOptions,
    ) -> AsyncIterator[RequestOutput]:
        """See `AsyncLLM.generate`."""
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
        default_max_tokens: int | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Prepared:
        """Tokenize and check a request, for `run`. Latencies are counted from `arrival_time` on the monotonic clock, by
        default from now. `default_max_tokens`: as in `InputProcessor.prepare`. Errors are those of the first iteration
        of `generate`."""
        take_options("AsyncLLM.prepare()", options)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.engine.check_admits()
        await self.engine.start()
        request_id = request_id if request_id is not None else f"req-{uuid.uuid4().hex}"
        check_request_id(request_id)
        self.adapters.int_ids.record(lora_request)
        return await self.text_side.requests.prepare(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            default_max_tokens=default_max_tokens,
            arrival_time=arrival_time,
            **options,
        )

    async def run(self, prepared: Prepared, *, delta: bool = False) -> AsyncGenerator[RequestOutput]:
        """Run a request; the outputs are those of `generate`. It may have waited: its adapter has the version, and the
        engine the state, of now. NotFoundError: the adapter was unloaded meanwhile."""
        request_id, kind = prepared.request_id, prepared.kind
        delta, at_end = delta or kind is RequestOutputKind.DELTA, kind is RequestOutputKind.FINAL_ONLY
        maker, outputs = self.text_side
        # The engine gets an id that is never used again: it may still report on an aborted request with the user's id.
        requests = await maker.sequences(prepared, f"{request_id}~{next(self._numbers)}")
        self.engine.check_admits()
        self.engine.process()  # one that is dead is an error before the request counts as running
        state = outputs.add(prepared, requests)
        consumer = self.pacer.open(request_id)
        try:
            self.engine.add(requests)
            while True:
                await consumer.wait()
                if at_end and not state.finished:
                    consumer.taken()
                    continue
                output = state.take(delta)
                if state.error is None:  # else that comes next
                    consumer.taken()
                if output.finished:
                    self.pacer.close(request_id, consumer)
                yield output
                if output.finished:
                    return
        finally:
            self.pacer.close(request_id, consumer)
            if not state.finished:
                self.engine.abort(outputs.abort(request_id))

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        lora_request: AnyLoRA | None,
        delta: bool,
        options: dict[str, Any],
    ) -> AsyncIterator[RequestOutput]:
        """See `AsyncLLM.chat`."""
        await self.engine.start()
        of_request = {name: options.pop(name) for name in RequestOptions.__annotations__ if name in options}
        prompt = await self.text_side.requests.chat_prompt(messages, lora_request, cast(ChatOptions, options))
        prepared = await self.prepare(
            prompt, sampling_params, request_id, lora_request=lora_request, **cast(RequestOptions, of_request)
        )
        async with contextlib.aclosing(self.run(prepared, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt | ParsedPrompt,
        params: BeamSearchParams,
        request_id: str | None,
        lora_request: AnyLoRA | None,
        on_step: Callable[[int], None] | None,
        options: RequestOptions,
    ) -> BeamSearchOutput:
        """See `AsyncLLM.beam_search`."""
        take_options("AsyncLLM.beam_search()", options)
        checked = step_params(params, await self.engine.start())
        search_id = request_id if request_id is not None else f"beam-{uuid.uuid4().hex}"
        prepared = await self.prepare(prompt, checked, search_id, lora_request=lora_request, **options)
        step = checked.clone(max_tokens=1)

        async def generate(index: int, beam: Prompt) -> RequestOutput:
            one = await self.prepare(beam, step, f"{search_id}-{index}", lora_request=prepared.lora, **options.copy())
            one = replace(one, loaded=prepared.loaded)  # an adapter that is unloaded meanwhile is an error
            async with contextlib.aclosing(self.run(one)) as outputs:
                return [output async for output in outputs][-1]

        with self.engine.admitted():
            return await search_async(prepared, params, generate, on_step)

    def count_speculation(self, request_id: str) -> None:
        """See `AsyncLLM.count_speculation`."""
        state = None if self._text_side is None else self._text_side.output_processor.get(request_id)
        if state is not None:
            state.count_speculation()

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `AsyncLLM.abort`."""
        for name in [] if self._text_side is None else request_ids:
            self.engine.abort(self.text_side.output_processor.abort(name))
            self.pacer.wake(name)

    async def share_prefixes(self, prefixes: Iterable[Sequence[int]]) -> None:
        """See `AsyncLLM.share_prefixes`."""
        processor = self.text_side.requests.input_processor
        processor.shared_prefixes = await asyncio.to_thread(SharedPrefixes, prefixes, self.engine.info.block_size)
