"""`LLM`: offline generation with the engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from ..core.compat.unsupported_options import reject_unsupported_options
from ..core.compat.vllm_python import GENERATE
from ..core.config import EngineArgs
from ..core.errors import InvalidUserInputError, invalid
from ..core.outputs import RequestOutput
from ..core.sampling_params import SamplingParams
from .adapters.llm_adapters import LLMAdapters
from .adapters.methods import SyncAdapterMethods
from .adapters.sources import AdapterSources
from .adapters.spelling import AnyLoRA, for_each, lora_of_each
from .beam_search import SyncBeamSearch
from .engine_factory import MadeFromArgs
from .engine_methods import SyncEngineMethods
from .llm_engine import LLMEngine
from .output_processor import RequestState
from .pooling import SyncPoolingMethods
from .progress import GenerationProgress
from .prompts import Prompt, as_prompts
from .sleeping import SyncSleepMethods
from .text.chat_template import ChatOptions

_OPTION_DEFAULTS: dict[str, Any] = {"priority": 0, "tenant": "", "weight": 1.0, "cache_salt": ""}

Messages: TypeAlias = list[dict[str, Any]]


class LLM(MadeFromArgs, SyncAdapterMethods, SyncPoolingMethods, SyncBeamSearch, SyncEngineMethods, SyncSleepMethods):
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

    def _set_up(self, args: EngineArgs, engine: str, sources: AdapterSources | None) -> None:
        self.llm_engine = LLMEngine(args, engine=engine, sources=sources)
        """The engine, for callers who step it by themselves."""
        self.adapters = self.llm_engine.adapters

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
        engine = self.llm_engine
        engine.check_open()
        reject_unsupported_options("LLM.generate()", options, GENERATE, _OPTION_DEFAULTS)
        batch = as_prompts(prompts)
        params: list[SamplingParams | None] = for_each("sampling_params", sampling_params, len(batch), None)
        loras = lora_of_each(lora_request, len(batch))
        columns = [for_each(name, options.get(name), len(batch), value) for name, value in _OPTION_DEFAULTS.items()]
        of_each: list[Any] = [dict(zip(_OPTION_DEFAULTS, row, strict=True)) for row in zip(*columns, strict=True)]
        work = [
            engine.prepare(prompt, one_params, lora_request=lora, **one_options)
            for prompt, one_params, lora, one_options in zip(batch, params, loras, of_each, strict=True)
        ]
        if engine.has_unfinished_requests():
            raise InvalidUserInputError("requests of llm_engine are running: step it until they have finished")
        states: list[RequestState] = []
        try:
            for prepared in work:
                states.append(engine.begin(prepared))  # noqa: PERF401 - those that have begun are aborted
            with GenerationProgress(len(states), use_tqdm) as progress:
                return self._run(states, progress, on_output)
        except BaseException:  # KeyboardInterrupt too: the next call must find the engine idle
            engine.abort_states(states)
            raise

    def _run(
        self,
        states: list[RequestState],
        progress: GenerationProgress,
        on_output: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        numbers = {state.request_id: number for number, state in enumerate(states)}
        while len(outputs) < len(states):
            for state in self.llm_engine.advance():
                if state.finished:
                    output = outputs[state.request_id] = state.take()
                    progress.update(state.num_prompt_tokens, sum(len(o.token_ids) for o in output.outputs))
                    if on_output is not None:
                        on_output(numbers[state.request_id], output)
        return [outputs[state.request_id] for state in states]

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
            raise invalid("messages", "must be a non-empty list")
        engine = self.llm_engine
        engine.check_open()
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
        of_requests = {name: options.pop(name) for name in _OPTION_DEFAULTS if name in options}
        prompts: list[Prompt] = []
        for conversation, lora in zip(conversations, lora_of_each(lora_request, len(conversations)), strict=True):
            prompts.append(engine.requests.chat_prompt(conversation, lora, cast(ChatOptions, options)).result())
        return self.generate(prompts, sampling_params, lora_request, use_tqdm, on_output, **of_requests)

    # --- the rest -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the engine's memory, also that of a GPU, whoever holds this object. A further call does nothing;
        methods that need the engine raise ShuttingDownError."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
