"""`LLMEngine`: an engine in this process that its caller steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast

from ..core.adapter_verbs import LocalAdapters
from ..core.config import EngineArgs
from ..core.errors import OutriderError, ShuttingDownError, invalid
from ..core.logs import trace_of
from ..core.outputs import RequestOutput
from ..core.sampling_params import RequestOutputKind, SamplingParams
from .adapters.llm_adapters import LLMAdapters
from .adapters.methods import SyncAdapterMethods
from .adapters.sources import AdapterSources
from .adapters.spelling import AnyLoRA
from .engine_factory import (
    DEFAULT_ENGINE,
    Engine,
    MadeFromArgs,
    demo_lora_requests,
    import_text_side,
    load_engine,
    load_text_side,
)
from .engine_methods import SyncEngineMethods
from .input_processor import InputProcessor, check_request_id, take_options
from .output_processor import OutputProcessor, RequestState
from .prepared import ParsedPrompt, Prepared, RequestOptions
from .prompts import Prompt
from .requests import RequestMaker
from .sampling_defaults import SamplingDefaults
from .sleeping import SyncSleepMethods

logger = logging.getLogger(__name__)


class LLMEngine(MadeFromArgs, SyncAdapterMethods, SyncEngineMethods, SyncSleepMethods):
    """Takes requests at any time, and computes a step when told to, as vLLM's class of that name. `LLM` is on top of it
    (`LLM.llm_engine`). Not thread-safe.

        engine = LLMEngine.from_engine_args(EngineArgs(model="Qwen/Qwen3-0.6B", enable_lora=True))
        engine.add_request("0", "Hello", SamplingParams(max_tokens=20), lora_request=LoRARequest("sql", 1, "/sql"))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    print(output.request_id, output.outputs[0].text)
    """

    adapters: LLMAdapters

    def __init__(
        self, args: EngineArgs, *, engine: str = DEFAULT_ENGINE, sources: AdapterSources | None = None
    ) -> None:
        """Load the model; errors are those of `LLM`. `engine` is an import path "module:callable"."""
        self._set_up(args, engine, sources)

    def _set_up(self, args: EngineArgs, engine: str, sources: AdapterSources | None) -> None:
        self.sources = sources if sources is not None else AdapterSources()
        self.sampling_defaults = SamplingDefaults(args.generation_config, self.sources, args.override_generation_config)
        """Sampling parameters of requests that leave them out."""
        if args.prompt_pacing is None:
            args = replace(args, prompt_pacing=False)
        self.make_engine = partial(load_engine(engine), args, progress=sys.stderr.isatty())
        """Maker of the engine, and of another one after a deep sleep."""
        # The tokenizer's library takes a second to import: meanwhile the weights are loaded. What goes wrong with it
        # goes wrong again below.
        with ThreadPoolExecutor(1, thread_name_prefix="imports") as beside:
            beside.submit(import_text_side, args)
            self.engine_core: Engine = self.make_engine()
        try:
            self.tokenizer, eos_token_ids = load_text_side(args, self.engine_core.info)
            self.sampling_defaults.read_model(self.engine_core.info.model)
            self.input_processor = InputProcessor(self.tokenizer, self.engine_core.info, eos_token_ids)
        except BaseException:
            self.engine_core.shutdown()
            raise
        self.adapters = LLMAdapters(self._open_adapters, self.sources, demo_lora_requests(args))
        self.requests = RequestMaker(
            self.input_processor, lambda: self.adapters.known, self.sources, self.sampling_defaults
        )
        self.output_processor = OutputProcessor()
        self._numbers = itertools.count()  # of the requests, for those without an id
        self._engine_numbers = itertools.count()  # of the requests that have begun, for their ids in the engine
        self._kinds: dict[str, RequestOutputKind] = {}  # of the requests of `add_request`
        self._errors: deque[OutriderError] = deque()  # of failed requests, for the next calls of `step`
        self._closed = False

    # --- vLLM's verbs ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: AnyLoRA | None = None,
        **options: Any,
    ) -> str:
        """Queue a request; returns its id. Prompts, adapters and errors are as in `LLM.generate`, `options` are those
        of `RequestOptions` and vLLM's keywords at values that change nothing.

        Args:
            arrival_time: not used; the time of this call counts.
        """
        take_options("LLMEngine.add_request()", options)
        self.check_open()
        check_request_id(request_id)
        if self.output_processor.get(request_id) is not None:
            raise invalid("request_id", f"{request_id!r} is already running")
        prepared = self.prepare(
            prompt, params, request_id=request_id, lora_request=lora_request, **cast(RequestOptions, options)
        )
        self.begin(prepared)
        self._kinds[request_id] = prepared.kind
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute a step; returns the outputs of the requests of `add_request` that it has changed, in the form of
        their `output_kind`.

        Raises:
            OutriderError: a request has failed, which a note of the error names. It is raised by the next call, and the
                other requests go on.
        """
        if self._errors:
            raise self._errors.popleft()
        outputs = []
        for state in self.advance():
            kind = self._kinds.get(state.request_id)
            if kind is None:
                continue
            if state.error is not None:
                state.error.add_note(f"request {state.request_id!r}")
                self._errors.append(state.error)
            elif state.finished or kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(state.take(delta=kind is RequestOutputKind.DELTA))
            if state.finished:
                del self._kinds[state.request_id]
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End one request, or several; no output follows. Ignores unknown ids."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            self._kinds.pop(request_id, None)
            self.engine_core.abort(self.output_processor.abort(request_id))
        self._settle()

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to compute or to tell."""
        return len(self.output_processor) > 0 or bool(self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that are not finished."""
        return len(self.output_processor)

    def shutdown(self) -> None:
        """Free the engine's memory, also that of a GPU; see `LLM.shutdown`."""
        if not self._closed:
            self._closed = True
            self.engine_core.shutdown()

    @property
    def llm_engine(self) -> LLMEngine:  # type: ignore[override]
        """This engine, for the methods that `LLM` has too."""
        return self

    # --- the same in pieces, for `LLM` -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ShuttingDownError after `shutdown`."""
        if self._closed:
            raise ShuttingDownError("this LLM has been shut down; make a new one")

    def _open_adapters(self) -> LocalAdapters:
        self.check_open()
        return self.engine_core.adapters

    def prepare(
        self,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        lora_request: AnyLoRA | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Prepared:
        """Check a request and make it ready; without an id it gets a number."""
        request_id = str(next(self._numbers)) if request_id is None else request_id
        check_request_id(request_id)
        self.adapters.numbers.note(lora_request)
        return self.requests.prepare(
            prompt, params, request_id=request_id, lora_request=lora_request, arrival_time=arrival_time, **options
        ).result()

    def begin(self, prepared: Prepared) -> RequestState:
        """Give a request to the engine, which may refuse it."""
        # The engine gets an id that is never used again.
        engine_id = f"{prepared.request_id}~{next(self._engine_numbers)}"
        requests = self.requests.sequences(prepared, engine_id).result()
        state = self.output_processor.add(prepared, requests)
        try:
            for request in requests:
                self.engine_core.add_request(request)
        except BaseException:
            self.engine_core.abort(self.output_processor.abort(prepared.request_id))
            raise
        return state

    def advance(self) -> list[RequestState]:
        """Compute a step; returns the requests that it has changed.

        Raises:
            OutriderError: the engine is idle although requests are unfinished.
        """
        if not self.engine_core.has_work():
            if len(self.output_processor):
                raise OutriderError("the engine lost a request: it is idle, and not all requests are finished")
            return []
        processed = self.output_processor.process(self.engine_core.step())
        if processed.aborts:
            self.engine_core.abort(processed.aborts)
        self._settle()
        return processed.touched

    def _settle(self) -> None:
        """Once all requests are finished, end the step that is in flight for one of them: it holds KV blocks and the
        adapter. Its error is nobody's: an engine that is broken raises on the next call."""
        while not len(self.output_processor) and self.engine_core.has_work():
            try:
                self.engine_core.step()
            except Exception as error:
                logger.warning("a step after the last request failed: %s", trace_of(error))
                return

    def abort_states(self, states: Sequence[RequestState]) -> None:
        """End requests after an error, which is the one to show."""
        aborts = [request_id for state in states for request_id in self.output_processor.abort(state.request_id)]
        # A state that failed is no longer in the processor, yet its other sequences may still be in the engine.
        aborts += [request_id for state in states if state.error is not None for request_id in state.running()]
        with contextlib.suppress(Exception):
            self.engine_core.abort(aborts)
            self._settle()
