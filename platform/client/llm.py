"""`LLM`: offline generation with the engine in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from ..core.adapter_verbs import LocalAdapters
from ..core.compat.foreign_options import take_foreign
from ..core.compat.vllm_python import GENERATE
from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError, OutriderError, ShuttingDownError
from ..core.messages import EngineInfo, EngineStats
from ..core.outputs import RequestOutput
from ..core.sampling_params import SamplingParams
from .adapters.llm_adapters import LLMAdapters
from .adapters.methods import SyncAdapterMethods
from .adapters.sources import AdapterSources
from .adapters.spelling import AnyLoRA, for_each, lora_of_each
from .engine_factory import (
    DEFAULT_ENGINE,
    demo_lora_requests,
    engine_args,
    import_text_side,
    load_engine,
    load_text_side,
)
from .input_processor import InputProcessor, Prompt, as_prompts, text_of
from .kernel_configs import use_kernel_configs
from .output_processor import OutputProcessor, RequestState
from .pooling import SyncPoolingMethods
from .progress import GenerationProgress
from .request_maker import Made, RequestMaker
from .sampling_defaults import SamplingDefaults
from .sleeping import SyncSleepMethods
from .text.chat_template import ChatOptions

_OPTION_DEFAULTS: dict[str, Any] = {"priority": 0, "tenant": "", "weight": 1.0, "cache_salt": ""}

Messages: TypeAlias = list[dict[str, Any]]


class LLM(SyncAdapterMethods, SyncPoolingMethods, SyncSleepMethods):
    """Loads a model and generates text, many prompts at a time.

    `LLM()` is the embedded demo model. Options are those of `EngineArgs`, by keyword. `kernel_configs` names a file of
    `tools/tune`, or a folder of them, for the GPU kernels of this process, of later objects too. Not thread-safe.

        with LLM("Qwen/Qwen3-0.6B", enable_lora=True) as llm:
            outputs = llm.generate("Hello", SamplingParams(max_tokens=20))
            print(outputs[0].outputs[0].text)

    Raises:
        TypeError: an option that does not exist.
        OutriderError: the typed error for an option or a model that cannot be used.
    """

    adapters: LLMAdapters

    def __init__(
        self,
        model: str | None = None,
        *,
        sources: AdapterSources | None = None,
        kernel_configs: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        args = engine_args("LLM", model, options)
        use_kernel_configs(kernel_configs)
        self._start(args, DEFAULT_ENGINE, sources)

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, engine: str = DEFAULT_ENGINE, sources: AdapterSources | None = None
    ) -> Self:
        """An LLM for these options; `engine` is an import path "module:callable" as `DEFAULT_ENGINE`."""
        self = cls.__new__(cls)
        self._start(args, engine, sources)
        return self

    def _start(self, args: EngineArgs, engine: str, sources: AdapterSources | None) -> None:
        sources = sources if sources is not None else AdapterSources()
        self._defaults = SamplingDefaults(args.generation_config, sources, args.override_generation_config)
        if args.prompt_pacing is None:
            args = replace(args, prompt_pacing=False)
        self._make_engine = partial(load_engine(engine), args, progress=sys.stderr.isatty())
        # The tokenizer's library takes a second to import: meanwhile the weights are loaded. What goes wrong with it
        # goes wrong again below.
        with ThreadPoolExecutor(1, thread_name_prefix="imports") as beside:
            beside.submit(import_text_side, args)
            self._engine = self._make_engine()
        try:
            self._tokenizer, eos_token_ids = load_text_side(args, self._engine.info)
            self._defaults.read_model(self._engine.info.model)
            input_processor = InputProcessor(self._tokenizer, self._engine.info, eos_token_ids)
        except BaseException:
            self._engine.shutdown()
            raise
        self.adapters = LLMAdapters(self._open_adapters, sources, demo_lora_requests(args))
        self._requests = RequestMaker(input_processor, lambda: self.adapters.known, sources, self._defaults)
        self._output_processor = OutputProcessor(self._tokenizer)
        self._num_requests = 0
        self._closed = False

    # --- generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        on_output: Callable[[int, RequestOutput], None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or for many; the outputs come in the order of the prompts.

        Args:
            prompts: a text, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these; a list of integers is
                one prompt of token ids.
            sampling_params: for all prompts, or one for each; None takes the adapter's or the model's defaults, see
                `get_default_sampling_params`.
            lora_request: the adapter for all prompts, or a list with one (or None) for each. An adapter is a
                LoRARequest or the name of one that is loaded, with a scale as `(adapter, 0.5)`; a list of such pairs,
                `[(a, 0.7), (b, 0.3)]`, is their weighted sum, for all prompts. For a mix of each prompt's own, give a
                list of such lists, or of LoRAMix.
            use_tqdm: show a progress bar; or a callable to make it with, as `tqdm`.
            on_output: called with the number of a prompt and its output as soon as that is complete.
            options: those of `RequestOptions`, each one value for all prompts or a list with one for each; vLLM's other
                keywords (`vllm_python.GENERATE`) at values that change nothing.
                Nothing is shared among tenants, no cached prefix either.

        Raises:
            OutriderError: the typed error of the first request that is wrong; nothing has been started then, or the
                others have been aborted.
            ShuttingDownError: after `shutdown`.
        """
        self._check_open()
        take_foreign("LLM.generate()", options, GENERATE, _OPTION_DEFAULTS)
        batch = as_prompts(prompts)
        params: list[SamplingParams | None] = for_each("sampling_params", sampling_params, len(batch), None)
        loras = lora_of_each(lora_request, len(batch))
        columns = [for_each(name, options.get(name), len(batch), value) for name, value in _OPTION_DEFAULTS.items()]
        of_each = [dict(zip(_OPTION_DEFAULTS, row, strict=True)) for row in zip(*columns, strict=True)]
        work: list[tuple[str, str | None, Made]] = []
        for prompt, one_params, lora, one_options in zip(batch, params, loras, of_each, strict=True):
            request_id = str(self._num_requests)
            self._num_requests += 1
            made = self._requests.make(prompt, one_params, request_id=request_id, lora_request=lora, **one_options)
            work.append((request_id, text_of(prompt), made.result()))
        states: list[RequestState] = []
        try:
            for request_id, text, (requests, tokenizer) in work:
                states.append(self._output_processor.add(request_id, requests, text, tokenizer))
                for request in requests:
                    self._engine.add_request(request)
            with GenerationProgress(len(states), use_tqdm) as progress:
                return self._run(states, progress, on_output)
        except BaseException:  # KeyboardInterrupt too: the next call must find the engine idle
            self._abort_all(states)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDownError("this LLM has been shut down; make a new one")

    def _open_adapters(self) -> LocalAdapters:
        self._check_open()
        return self._engine.adapters

    def _run(
        self,
        states: list[RequestState],
        progress: GenerationProgress,
        on_output: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        numbers = {state.request_id: number for number, state in enumerate(states)}
        while len(outputs) < len(states):
            if not self._engine.has_work():
                raise OutriderError("the engine lost a request: it is idle, and not all requests are finished")
            processed = self._output_processor.process(self._engine.step())
            if processed.aborts:
                self._engine.abort(processed.aborts)
            for state in processed.touched:
                if state.finished:
                    output = outputs[state.request_id] = state.take()
                    progress.update(state.num_prompt_tokens, sum(len(o.token_ids) for o in output.outputs))
                    if on_output is not None:
                        on_output(numbers[state.request_id], output)
        return [outputs[state.request_id] for state in states]

    def _abort_all(self, states: list[RequestState]) -> None:
        aborts = [request_id for state in states for request_id in self._output_processor.abort(state.request_id)]
        # A state that failed is no longer in the processor, yet its other sequences may still be in the engine.
        aborts += [request_id for state in states if state.error is not None for request_id in state.running()]
        with contextlib.suppress(Exception):  # the error that brought us here is the one to show
            self._engine.abort(aborts)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        on_output: Callable[[int, RequestOutput], None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn of one conversation, or of each of a list of them.

        `options` are those of `ChatOptions`, the same for all, and those of `generate`; the rest is as in `generate`.
        The chat template in an adapter's folder takes the place of the model's.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError("messages must be a non-empty list", param="messages")
        self._check_open()
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
        of_requests = {name: options.pop(name) for name in _OPTION_DEFAULTS if name in options}
        prompts: list[Prompt] = []
        for conversation, lora in zip(conversations, lora_of_each(lora_request, len(conversations)), strict=True):
            prompts.append(self._requests.chat_prompt(conversation, lora, cast(ChatOptions, options)).result())
        return self.generate(prompts, sampling_params, lora_request, use_tqdm, on_output, **of_requests)

    # --- the rest -------------------------------------------------------------------------------------------------

    @property
    def engine_info(self) -> EngineInfo:
        """Model, dtype and limits of the engine."""
        return self._engine.info

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the defaults of the model's generation_config.json, or of the file that the option
        `generation_config` names."""
        return SamplingParams(**self._defaults.of_model)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Release the engine; further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
