"""`LLM`: offline generation with the engine in this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack, cast

from ..core.beam_search import BeamSearchOutput, BeamSearchParams
from ..core.compat.unsupported_options import reject_unsupported_options
from ..core.compat.vllm_python import GENERATE
from ..core.config import EngineArgs
from ..core.errors import invalid
from ..core.lora_request import LoRARequest, TensorOptions, tensor_request
from ..core.messages import AdapterInfo, EngineInfo, EngineStats
from ..core.outputs import RequestOutput
from ..core.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classifying,
)
from ..core.sampling_params import SamplingParams
from . import engine_factory, pooling
from .adapters.llm_adapters import LLMAdapters
from .adapters.lora_argument import AnyLoRA, for_each, lora_of_each
from .adapters.sources import AdapterSources
from .beam_search import search_all
from .engine_factory import DEFAULT_ENGINE, check_life_options, engine_args, missing_attribute
from .engine_life import EngineLife
from .input_processor import take_options
from .kernel_configs import use_kernel_configs
from .llm_engine import LLMEngine
from .metrics import Metric
from .offline_batch import run_batch
from .prompts import Prompt, as_prompts
from .text.chat_template import ChatOptions

_OPTION_DEFAULTS: dict[str, Any] = {"priority": 0, "tenant": "", "weight": 1.0, "cache_salt": ""}

Messages: TypeAlias = list[dict[str, Any]]


class LLM(EngineLife):
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
    """Loads, unloads and pins adapters; each verb says what it raises."""

    def __init__(
        self,
        model: str | None = None,
        *,
        sources: AdapterSources | None = None,
        kernel_configs: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        args = engine_args(type(self).__name__, model, options)
        use_kernel_configs(kernel_configs)
        self._set_up(LLMEngine(args, engine=engine_factory.DEFAULT_ENGINE, sources=sources))

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        engine: str = DEFAULT_ENGINE,
        sources: AdapterSources | None = None,
        **of_vllm: Any,
    ) -> Self:
        """An object for these options; `engine` is an import path "module:callable" as `DEFAULT_ENGINE`, and `of_vllm`
        are vLLM's keywords (`vllm_python.ENGINE_LIFE`), without an effect."""
        check_life_options(cls.__name__, of_vllm)
        self = cls.__new__(cls)
        self._set_up(LLMEngine(engine_args, engine=engine, sources=sources))
        return self

    def _set_up(self, engine: LLMEngine) -> None:
        self.llm_engine, self._engine = engine, engine.engine
        """The engine, for callers who step it by themselves."""
        self.adapters = engine.adapters
        self.prepare, self.run = engine.prepare, functools.partial(run_batch, engine)
        """`generate` in two steps, between which requests may wait."""

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise missing_attribute(self, name)

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
        return run_batch(engine, work, use_tqdm, on_output)

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
        The chat template in an adapter's folder replaces the model's.
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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        **options: Any,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of one prompt, or of each of many, as far as beam search finds them.

        Prompts, adapters, options and errors are as in `generate`. Results are those of vLLM's method: the tokens and
        the text of a sequence begin with the prompt.

        Args:
            concurrency_limit: prompts that are searched at a time; None: all.
        """
        return search_all(self, prompts, params, lora_request, use_tqdm, concurrency_limit, options)

    # --- hidden states --------------------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of one prompt or of many: their pooled hidden states after the final norm, of length 1.

        Prompts, adapters and options are as in `generate`, and so are errors; a wrong field of the parameters is named
        in `param`.
        """
        results = pooling.pool(self, "embed", prompts, pooling_params, lora_request, use_tqdm, options)
        return [*map(pooling.embedding, *results)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: str = "embed",
        **options: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pooled hidden states as they are, of any length; the rest is as in `embed`."""
        pooling.check_task(pooling_task)
        results = pooling.pool(self, "encode", prompts, pooling_params, lora_request, use_tqdm, options)
        return [*map(pooling.encoding, *results)]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        lora_request: AnyLoRA | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Cosine similarity of pairs of texts: one with each of many, or lists of one length pair by pair."""
        first, second = pooling.pairs(text_1, text_2)
        texts = [*first, *second]
        outputs, _ = pooling.pool(self, "score", texts, pooling_params, lora_request, use_tqdm, options)
        return pooling.scores(pooling_params, outputs)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels of a classifier, a checkpoint `...ForSequenceClassification`, for each prompt:
        their softmax, or sigmoids of a single label and of labels that do not exclude each other.

        Prompts, adapters and options are as in `generate`.
        """
        take_options("LLM.classify()", options)
        return [*map(pooling.classification, self.generate(prompts, classifying(), lora_request, use_tqdm, **options))]

    # --- adapters: see `Adapters` ---------------------------------------------------------------------------------

    def load_lora_adapter(self, lora_request: LoRARequest | str, **options: Unpack[TensorOptions]) -> AdapterInfo:
        """See `Adapters.load`. With `tensors` and `peft_config` the adapter of the name `lora_request` is made of
        them, see `TensorLoRARequest`."""
        request, rest = tensor_request(lora_request, options)
        return self.adapters.load(request, **rest)

    def register_lora_adapters(self, lora_requests: Sequence[LoRARequest]) -> None:
        """See `Adapters.register`."""
        self.adapters.register(lora_requests)

    def unload_lora(self, lora_name: str, mode: str = "drain") -> None:
        """See `Adapters.unload`."""
        self.adapters.unload(lora_name, mode)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter when its requests have finished."""
        self.adapters.unload(lora_name)

    def pin_lora(self, lora_name: str | int) -> AdapterInfo:
        """See `Adapters.pin`; the integer of a request stands for its adapter's name."""
        return self.llm_engine.pin_lora(lora_name)

    def unpin_lora(self, lora_name: str | int) -> AdapterInfo:
        """See `Adapters.unpin`."""
        return self.llm_engine.unpin_lora(lora_name)

    def list_lora_adapters(self) -> list[AdapterInfo]:
        """See `Adapters.list`."""
        return self.adapters.list()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, or leave it as it is when it is loaded under its name from the same folder. Returns True."""
        return self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int | str) -> bool:
        """Unload the adapter of an integer or a name when its requests have finished; False when there is none."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Integers of the registered adapters that were given with one; `list_lora_adapters` knows all."""
        return self.adapters.ids()

    # --- the engine -----------------------------------------------------------------------------------------------

    @property
    def engine_info(self) -> EngineInfo:
        """Model, dtype and limits of the engine."""
        return self.llm_engine.engine_info

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the defaults of the model's generation_config.json, or of the file that the option
        `generation_config` names."""
        return self.llm_engine.get_default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            InvalidRequestError: there is none: `skip_tokenizer_init`.
        """
        return self.llm_engine.get_tokenizer()

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self.llm_engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Metrics as vLLM's `LLM.get_metrics` gives them, with its names: `Counter`, `Gauge`, `Vector`, `Histogram`.

        Counts of drafts have a label `adapter`, "" for the base model.
        """
        return self.llm_engine.get_metrics()

    def start_profile(self, folder: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        """Record the engine's steps with torch's profiler until `stop_profile`.

        Args:
            folder: where the files are written; None: as the variable OUTRIDER_PROFILE_DIR says, or vLLM's
                VLLM_TORCH_PROFILER_DIR.
            prefix: prefix of the file names.

        Raises:
            InvalidRequestError: no folder is named, or it cannot be made.
            InvalidUserInputError: a profile is being recorded.
        """
        self.llm_engine.start_profile(folder, prefix)

    def stop_profile(self) -> str:
        """Write a trace for Perfetto or chrome://tracing, and a table of operations (.txt); returns the trace's path.

        Raises:
            InvalidUserInputError: nothing is being recorded.
        """
        return self.llm_engine.stop_profile()

    def reset_prefix_cache(self) -> bool:
        """Forget the cached prefixes of prompts; True when nothing is cached any more."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the engine's memory, also on a GPU, even if this object is still in use. A further call does nothing;
        methods that need the engine raise ShuttingDownError."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
