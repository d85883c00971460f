"""`LLMEngine`: an engine in this process that its caller steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from ..core.config import EngineArgs
from ..core.errors import OutriderError, invalid
from ..core.logs import format_trace
from ..core.lora_request import LoRARequest, TensorOptions, tensor_request
from ..core.messages import AdapterInfo, EngineInfo, EngineStats
from ..core.outputs import RequestOutput
from ..core.sampling_params import RequestOutputKind, SamplingParams
from .adapters.llm_adapters import LLMAdapters
from .adapters.lora_argument import AnyLoRA
from .adapters.sources import AdapterSources
from .engine_factory import (
    DEFAULT_ENGINE,
    Engine,
    check_life_options,
    demo_lora_requests,
    import_text_side,
    load_engine,
    load_text_side,
    missing_attribute,
)
from .engine_life import EngineLife
from .input_processor import InputProcessor, check_request_id, take_options
from .local_engine import LocalEngine
from .metrics import Metric, collect_metrics
from .output_processor import OutputProcessor, RequestState
from .prepared import ParsedPrompt, Prepared, RequestOptions
from .profile_folder import profile_folder
from .prompts import Prompt
from .requests import RequestMaker
from .sampling_defaults import SamplingDefaults
from .text.no_tokenizer import OPTION, needed

logger = logging.getLogger(__name__)


class LLMEngine(EngineLife):
    """Takes requests at any time, and computes a step on request, as vLLM's class of that name. `LLM` is on top of it
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
        self.sources = sources if sources is not None else AdapterSources()
        self.sampling_defaults = SamplingDefaults(args.generation_config, self.sources, args.override_generation_config)
        """Sampling parameters of requests that leave them out."""
        if args.prompt_pacing is None:
            args = replace(args, prompt_pacing=False)
        # The tokenizer's library takes a second to import: meanwhile the weights are loaded. What goes wrong with it
        # goes wrong again below.
        with ThreadPoolExecutor(1, thread_name_prefix="imports") as imports:
            imports.submit(import_text_side, args)
            self.engine = self._engine = LocalEngine(
                partial(load_engine(engine), args, progress=sys.stderr.isatty()),
                on_end=lambda infos: self.adapters.loaded.adopt(infos),
                on_restart=lambda: self.adapters.reload_after_restart(),
            )
        try:
            self.tokenizer, eos_token_ids = load_text_side(args, self.engine_info)
            self.sampling_defaults.read_model(self.engine_info.model)
            self.input_processor = InputProcessor(self.tokenizer, self.engine_info, eos_token_ids)
        except BaseException:
            self.engine.close()
            raise
        self.adapters = LLMAdapters(self.engine, self.sources, demo_lora_requests(args))
        self.requests = RequestMaker(
            self.input_processor,
            lambda: self.adapters.known,
            self.sources,
            self.sampling_defaults,
            self.adapters.loaded.requests,
        )
        self.output_processor = OutputProcessor()
        self._numbers = itertools.count()  # of the requests, for those without an id
        self._engine_numbers = itertools.count()  # of the requests that have begun, for their ids in the engine
        self._kinds: dict[str, RequestOutputKind] = {}  # of the requests of `add_request`
        self._errors: deque[OutriderError] = deque()  # of failed requests, for the next calls of `step`

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        engine: str = DEFAULT_ENGINE,
        sources: AdapterSources | None = None,
        **of_vllm: Any,
    ) -> Self:
        """See `LLM.from_engine_args`."""
        check_life_options(cls.__name__, of_vllm)
        return cls(engine_args, engine=engine, sources=sources)

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise missing_attribute(self, name)

    @property
    def engine_core(self) -> Engine:
        """The engine itself; AsleepError while it sleeps without its weights."""
        return self.engine.core

    # --- requests -------------------------------------------------------------------------------------------------

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
                other requests continue.
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
            self.engine.abort(self.output_processor.abort(request_id))
        self._settle()

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to compute or to report."""
        return len(self.output_processor) > 0 or bool(self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that are not finished."""
        return len(self.output_processor)

    # --- adapters: see `core.adapter_verbs.Adapters` --------------------------------------------------------------

    def load_lora_adapter(self, lora_request: LoRARequest | str, **options: Unpack[TensorOptions]) -> AdapterInfo:
        """See `LLM.load_lora_adapter`."""
        request, rest = tensor_request(lora_request, options)
        return self.adapters.load(request, **rest)

    def register_lora_adapters(self, lora_requests: Sequence[LoRARequest]) -> None:
        """See `Adapters.register`."""
        self.adapters.register(lora_requests)

    def unload_lora(self, lora_name: str, mode: str = "drain") -> None:
        """See `Adapters.unload`."""
        self.adapters.unload(lora_name, mode)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """See `LLM.unload_lora_adapter`."""
        self.adapters.unload(lora_name)

    def pin_lora(self, lora_name: str | int) -> AdapterInfo:
        """See `LLM.pin_lora`."""
        return self.adapters.pin(self.adapters.int_ids.name_of(lora_name))

    def unpin_lora(self, lora_name: str | int) -> AdapterInfo:
        """See `Adapters.unpin`."""
        return self.adapters.unpin(self.adapters.int_ids.name_of(lora_name))

    def list_lora_adapters(self) -> list[AdapterInfo]:
        """See `Adapters.list`."""
        return self.adapters.list()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        return self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int | str) -> bool:
        """See `LLM.remove_lora`."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return self.adapters.ids()

    # --- the engine -----------------------------------------------------------------------------------------------

    @property
    def engine_info(self) -> EngineInfo:
        """Model, dtype and limits of the engine."""
        return self.engine.info

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return SamplingParams(**self.sampling_defaults.of_model)

    def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        return needed(self.tokenizer, "get_tokenizer()", OPTION)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return cast(EngineStats, self.engine.call("stats"))

    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        return collect_metrics(self.engine_info.model, self.stats(), self.output_processor.totals)

    def start_profile(self, folder: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        """See `LLM.start_profile`."""
        self.engine.call("start_profile", folder=profile_folder(folder), prefix=prefix)

    def stop_profile(self) -> str:
        """See `LLM.stop_profile`."""
        return str(self.engine.call("stop_profile"))

    def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return bool(self.engine.call("reset_prefix_cache"))

    def shutdown(self) -> None:
        """See `LLM.shutdown`."""
        self.engine.close()

    # --- requests in pieces, for `LLM` ----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ShuttingDownError after `shutdown`."""
        self.engine.check_open()

    def prepare(
        self,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Prepared:
        """Tokenize and check a request; without an id it gets a number. See `RequestStreams.prepare`."""
        take_options("LLM.prepare()", options)
        self.check_open()
        request_id = str(next(self._numbers)) if request_id is None else request_id
        check_request_id(request_id)
        self.adapters.int_ids.record(lora_request)
        return self.requests.prepare(
            prompt, params, request_id, lora_request=lora_request, arrival_time=arrival_time, **options
        ).result()

    def begin(self, prepared: Prepared) -> RequestState:
        """Give a request to the engine, which may refuse it."""
        # The engine gets an id that is never used again.
        engine_id = f"{prepared.request_id}~{next(self._engine_numbers)}"
        requests = self.requests.sequences(prepared, engine_id).result()
        state = self.output_processor.add(prepared, requests)
        try:
            self.engine.add(requests)
        except BaseException:
            self.engine.abort(self.output_processor.abort(prepared.request_id))
            raise
        return state

    def advance(self) -> list[RequestState]:
        """Compute a step; returns the requests that it has changed.

        Raises:
            OutriderError: the engine is idle although requests are unfinished.
        """
        if not self.engine.has_work():
            if len(self.output_processor) and not self.engine.is_paused:
                raise OutriderError("the engine lost a request: it is idle, and not all requests are finished")
            return []
        processed = self.output_processor.process(self.engine.step())
        if processed.aborts:
            self.engine.abort(processed.aborts)
        self._settle()
        return processed.touched

    def _settle(self) -> None:
        """Once all requests are finished, end the step that is in flight for one of them: it holds KV blocks and the
        adapter. Its error is ignored: an engine that is broken raises on the next call."""
        while not len(self.output_processor) and self.engine.has_work():
            try:
                self.engine.step()
            except Exception as error:
                logger.warning("a step after the last request failed: %s", format_trace(error))
                return

    def abort_states(self, states: Sequence[RequestState]) -> None:
        """End requests after an error, which is the one to show."""
        aborts = [request_id for state in states for request_id in self.output_processor.abort(state.request_id)]
        # A state that failed is no longer in the processor, yet its other sequences may still be in the engine.
        aborts += [request_id for state in states if state.error is not None for request_id in state.running()]
        with contextlib.suppress(Exception):
            self.engine.abort(aborts)
            self._settle()
