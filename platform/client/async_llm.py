"""`AsyncLLM`: generation for asyncio, with the engine in a process of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from ..core.beam_search import BeamSearchOutput, BeamSearchParams
from ..core.config import EngineArgs
from ..core.errors import OutriderError
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
)
from ..core.sampling_params import SamplingParams
from . import engine_factory, pooling
from .adapters.loaded_adapters import LoadedAdapters
from .adapters.lora_argument import AnyLoRA
from .adapters.sources import AdapterSources
from .engine_factory import DEFAULT_ENGINE, check_life_options, engine_args, missing_attribute
from .engine_life import AsyncEngineLife
from .input_processor import InputProcessor
from .kernel_configs import use_kernel_configs
from .metrics import Metric, collect_metrics
from .output_processor import OutputProcessor
from .prepared import ParsedPrompt, RequestOptions
from .process.supervisor import EngineSpec
from .profile_folder import profile_folder
from .prompts import Prompt
from .request_streams import RequestStreams
from .requests import RequestMaker
from .sampling_defaults import SamplingDefaults
from .text.no_tokenizer import OPTION, needed


class AsyncLLM(AsyncEngineLife):
    """Generates text from asyncio; all calls belong to one event loop.

        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=20), delta=True):
                print(output.outputs[0].text, end="")

    Options are those of `EngineArgs`, by keyword; `AsyncLLM()` is the embedded demo model. When the engine process
    dies, running requests fail with EngineDeadError, and it is started again; adapters that had been loaded are
    loaded again. `sources` adds to the sources of adapters: folders, the hub and object stores.
    """

    adapters: LoadedAdapters
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
        self._set_up(EngineSpec(args=args, engine=engine_factory.DEFAULT_ENGINE), sources)

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
        return cls.from_spec(EngineSpec(args=engine_args, engine=engine), sources)

    @classmethod
    def from_spec(cls, spec: EngineSpec, sources: AdapterSources | None = None) -> Self:
        """An AsyncLLM with another engine, or another policy for restarts."""
        self = cls.__new__(cls)
        self._set_up(spec, sources)
        return self

    def _set_up(self, spec: EngineSpec, sources: AdapterSources | None) -> None:
        self.sources = sources if sources is not None else AdapterSources()
        args = spec.args
        self.sampling_defaults = SamplingDefaults(args.generation_config, self.sources, args.override_generation_config)
        """Sampling parameters of requests that leave them out."""
        self._streams = RequestStreams(spec, self.sources, self.sampling_defaults)
        self.engine, self.adapters = self._streams.engine, self._streams.adapters
        self.prepare, self.run = self._streams.prepare, self._streams.run  # `generate` in two steps

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise missing_attribute(self, name)

    async def start(self) -> EngineInfo:
        """Start the engine process and wait until it is ready; once, however often it is called.

        Raises:
            OutriderError: the typed error of the engine that could not start.
            ShuttingDownError: after `shutdown`.
            InvalidUserInputError: in another event loop than the first time.
        """
        return await self.engine.start()

    @property
    def state(self) -> str:
        """ "starting", "ready", "paused", "restarting", "sleeping", "draining" or "stopped"."""
        return self.engine.state.label

    @property
    def failure(self) -> OutriderError | None:
        """Reason why the engine has been given up; None while it has not."""
        return self.engine.failure

    @property
    def num_restarts(self) -> int:
        """Number of times that the engine has been started again."""
        return self.engine.num_restarts

    @property
    def engine_pid(self) -> int | None:
        """Id of the engine process that runs now."""
        return self.engine.pid

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._streams.pacer)

    @property
    def info(self) -> EngineInfo:
        """Model, dtype and limits of the engine. EngineDeadError before the first start, as of the following."""
        return self.engine.info

    engine_info = info

    @property
    def input_processor(self) -> InputProcessor:
        """Prompts to requests."""
        return self.requests.input_processor

    @property
    def requests(self) -> RequestMaker:
        """Tokenizers and chat templates of the model and of adapters, for requests."""
        return self._streams.text_side.requests

    @property
    def output_processor(self) -> OutputProcessor:
        """The engine's tokens to outputs."""
        return self._streams.text_side.output_processor

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None under `skip_tokenizer_init`."""
        return self.input_processor.tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        await self.start()
        return SamplingParams(**self.sampling_defaults.of_model)

    async def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        await self.start()
        return needed(self.tokenizer, "get_tokenizer()", OPTION)

    async def check_health(self) -> None:
        """Raise the error that a request would get: the engine is being started again, sleeps or is given up."""
        await self.start()
        self.engine.process()

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters; they start from zero when the engine has been started again."""
        return cast(EngineStats, await self.engine.call("stats"))

    async def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        info = await self.start()
        return collect_metrics(info.model, await self.stats(), self.output_processor.totals)

    async def start_profile(self, folder: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        """See `LLM.start_profile`; it is the engine's process that is profiled."""
        await self.engine.call("start_profile", folder=profile_folder(folder), prefix=prefix)

    async def stop_profile(self) -> str:
        """See `LLM.stop_profile`."""
        return str(await self.engine.call("stop_profile"))

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`. False while requests use what is cached."""
        await self.start()
        return self.engine.sleep_level > 0 or bool(await self.engine.call("reset_prefix_cache"))

    async def share_prefixes(self, prefixes: Iterable[Sequence[int]]) -> None:
        """Share the KV of these prefixes of prompts (token ids) among all tenants from now on, and of no others.
        Requests with a `cache_salt` share nothing. One call at a time. EngineDeadError before the first start."""
        await self._streams.share_prefixes(prefixes)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests (ShuttingDownError) and wait at most `timeout` seconds for the running ones; True when
        all have finished."""
        return await self.engine.drain(timeout)

    def shutdown(self) -> Awaitable[None]:
        """Fail what still runs with ShuttingDownError and end the engine process. May be called twice.

        In an event loop the result may be awaited, until the process has ended, but need not be. Elsewhere the process
        has ended on return.
        """
        return self.engine.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def generate(
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
        return self._streams.generate(prompt, sampling_params, request_id, lora_request, delta, options)

    def chat(
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
        an adapter's folder replaces the model's.
        """
        return self._streams.chat(messages, sampling_params, request_id, lora_request, delta, options)

    def count_speculation(self, request_id: str) -> None:
        """Bring the counts of drafts in a running request's metrics up to date; its end does that by itself."""
        self._streams.count_speculation(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a running request, or several; each iterator gets a last output, with finish reason "abort". Ignores
        unknown ids."""
        self._streams.abort([request_id] if isinstance(request_id, str) else list(request_id))

    async def beam_search(
        self,
        prompt: Prompt | ParsedPrompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        on_step: Callable[[int], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> BeamSearchOutput:
        """The most likely continuations of a prompt; see `LLM.beam_search`. Cancelling ends the search. `on_step` is
        called after each step with the output tokens that the result would have if it were the last."""
        return await self._streams.beam_search(prompt, params, request_id, lora_request, on_step, options)

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        **options: Any,
    ) -> EmbeddingRequestOutput:
        """Embedding of a prompt; see `LLM.embed`."""
        [output] = await pooling.pool_async(self, "embed", [prompt], pooling_params, request_id, lora_request, options)
        return pooling.embedding(output, pooling_params)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AnyLoRA | None = None,
        pooling_task: str = "embed",
        **options: Any,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Pooled hidden states of a prompt; see `LLM.encode`."""
        pooling.check_task(pooling_task)
        [output] = await pooling.pool_async(self, "encode", [prompt], pooling_params, request_id, lora_request, options)
        return pooling.encoding(output, pooling_params)

    async def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        lora_request: AnyLoRA | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Cosine similarity of pairs of texts; see `LLM.score`."""
        first, second = pooling.pairs(text_1, text_2)
        texts = [*first, *second]
        outputs = await pooling.pool_async(self, "score", texts, pooling_params, None, lora_request, options)
        return pooling.scores(pooling_params, outputs)

    async def classify(
        self, prompt: Prompt, request_id: str | None = None, *, lora_request: AnyLoRA | None = None, **options: Any
    ) -> ClassificationRequestOutput:
        """Probabilities of the labels of a prompt; see `LLM.classify`."""
        [output] = await pooling.pool_async(self, "classify", [prompt], None, request_id, lora_request, options)
        return pooling.classification(output)

    async def load_lora_adapter(self, lora_request: LoRARequest | str, **options: Unpack[TensorOptions]) -> AdapterInfo:
        """See `LLM.load_lora_adapter`."""
        request, rest = tensor_request(lora_request, options)
        return await self.adapters.load(request, **rest)

    async def register_lora_adapters(self, lora_requests: Sequence[LoRARequest]) -> None:
        """See `Adapters.register`."""
        await self.adapters.register(lora_requests)

    async def unload_lora(self, lora_name: str, mode: str = "drain") -> None:
        """See `Adapters.unload`."""
        await self.adapters.unload(lora_name, mode)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """See `LLM.unload_lora_adapter`."""
        await self.adapters.unload(lora_name)

    async def pin_lora(self, lora_name: str | int) -> AdapterInfo:
        """See `LLM.pin_lora`."""
        return await self.adapters.pin(self.adapters.int_ids.name_of(lora_name))

    async def unpin_lora(self, lora_name: str | int) -> AdapterInfo:
        """See `Adapters.unpin`."""
        return await self.adapters.unpin(self.adapters.int_ids.name_of(lora_name))

    async def list_lora_adapters(self) -> list[AdapterInfo]:
        """See `Adapters.list`."""
        return await self.adapters.list()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        return await self.adapters.add(lora_request)

    async def remove_lora(self, lora_id: int | str) -> bool:
        """See `LLM.remove_lora`."""
        return await self.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return await self.adapters.ids()
