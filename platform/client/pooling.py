"""`embed`, `encode`, `score` and `classify` of `LLM` and `AsyncLLM`: hidden states of prompts in place of texts."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...models.checkpoint.json_files import read_json
from ..core.errors import InvalidRequestError, NotFoundError, OutriderError, invalid
from ..core.messages import EngineInfo
from ..core.outputs import RequestOutput
from ..core.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    classifying,
)
from ..core.sampling_params import SamplingParams
from ..core.tasks import run_all
from .adapters.lora_argument import AnyLoRA, for_each
from .input_processor import take_options
from .prompts import Prompt, as_prompts

R = TypeVar("R", bound=PoolingRequestOutput[Any])

_FILE = Path("1_Pooling") / "config.json"
_MODES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}


@functools.cache
def model_pooling(folder: str) -> str:
    """Pooling that the sentence-transformers files of a model name; "last" without any.

    Raises:
        InvalidRequestError: they name none that is served.
    """
    try:
        modes = read_json(Path(folder) / _FILE)
    except NotFoundError:
        return "last"
    named = [mode for mode in _MODES if modes.get(f"pooling_mode_{mode}") is True]
    if len(named) != 1:
        raise InvalidRequestError(f"{_FILE} names no pooling of {', '.join(_MODES)}; choose one", param="pooling")
    return _MODES[named[0]]


@functools.cache
def model_labels(folder: str) -> dict[str, str]:
    """Names of a classifier's labels, by number, as its config.json has them; {} without any."""
    named = read_json(Path(folder) / "config.json").get("id2label") or {}
    return {str(number): str(label) for number, label in named.items()}


class _Engine(Protocol):
    @property
    def engine_info(self) -> EngineInfo: ...


def _sampling(llm: _Engine, params: PoolingParams | None) -> SamplingParams:
    params = params if params is not None else PoolingParams()
    if not isinstance(params, PoolingParams):
        raise invalid("pooling_params", f"must be PoolingParams, got {params!r}")
    info = llm.engine_info
    return params.sampling(params.pooling or model_pooling(info.model))


def _vector(params: PoolingParams | None, output: RequestOutput, *, normalize: bool = True) -> list[float]:
    if output.pooled is None:
        raise OutriderError("the request was aborted")
    return (params or PoolingParams()).vector(output.pooled, normalize=normalize)


def _labels(output: RequestOutput) -> ClassificationRequestOutput:
    if output.pooled is None:
        raise OutriderError("the request was aborted")
    return _result(ClassificationRequestOutput, output, ClassificationOutput(output.pooled))


def _result(kind: type[R], output: RequestOutput, value: Any) -> R:
    return kind(output.request_id, value, output.prompt_token_ids, output.num_cached_tokens)


def _check_task(task: str) -> None:
    if task != "embed":
        raise invalid("pooling_task", f"must be 'embed', got {task!r}")


def _pairs(text_1: Prompt | Sequence[Prompt], text_2: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """The texts as lists of one length; a single first text is paired with each of the second.

    Raises:
        InvalidRequestError: the lists have different lengths.
    """
    first, second = as_prompts(text_1), as_prompts(text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise invalid("text_1", f"has {len(first)} entries for {len(second)} of text_2")
    return first, second


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of two vectors; 0 where one is zero."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (lengths or 1.0)


def _scores(params: PoolingParams | None, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
    """Similarities of pairs of texts; `outputs` has all first texts, and then all second ones."""
    half, scores = len(outputs) // 2, []
    for first, second in zip(outputs[:half], outputs[half:], strict=True):
        similarity = cosine(_vector(params, first), _vector(params, second))
        result = _result(ScoringRequestOutput, first, ScoringOutput(similarity))
        result.prompt_token_ids = [*first.prompt_token_ids, *second.prompt_token_ids]
        scores.append(result)
    return scores


class SyncPoolingMethods:
    """Methods of `LLM`, by its `generate`."""

    generate: Callable[..., list[RequestOutput]]

    if TYPE_CHECKING:

        @property
        def engine_info(self) -> EngineInfo: ...

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
        outputs, params = self._pooled("embed", prompts, pooling_params, lora_request, use_tqdm, options)
        return [
            _result(EmbeddingRequestOutput, output, EmbeddingOutput(_vector(one, output)))
            for output, one in zip(outputs, params, strict=True)
        ]

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
        _check_task(pooling_task)
        outputs, params = self._pooled("encode", prompts, pooling_params, lora_request, use_tqdm, options)
        return [
            _result(PoolingRequestOutput, output, PoolingOutput(_vector(one, output, normalize=False)))
            for output, one in zip(outputs, params, strict=True)
        ]

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
        first, second = _pairs(text_1, text_2)
        outputs, _ = self._pooled("score", [*first, *second], pooling_params, lora_request, use_tqdm, options)
        return _scores(pooling_params, outputs)

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
        return [*map(_labels, self.generate(prompts, classifying(), lora_request, use_tqdm, **options))]

    def _pooled(
        self, method: str, prompts: Any, params: Any, lora: Any, use_tqdm: Any, options: dict[str, Any]
    ) -> tuple[list[RequestOutput], list[PoolingParams | None]]:
        take_options(f"LLM.{method}()", options)
        batch = as_prompts(prompts)
        of_each: list[PoolingParams | None] = for_each("pooling_params", params, len(batch), None)
        sampling = [_sampling(self, one) for one in of_each]
        return self.generate(batch, sampling, lora, use_tqdm, **options), of_each


class AsyncPoolingMethods:
    """Methods of `AsyncLLM`, by its `generate`."""

    generate: Callable[..., AsyncIterator[RequestOutput]]
    start: Callable[..., Any]

    if TYPE_CHECKING:

        @property
        def engine_info(self) -> EngineInfo: ...

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
        take_options("AsyncLLM.embed()", options)
        output = await self._pooled(prompt, pooling_params, request_id, lora_request, options)
        return _result(EmbeddingRequestOutput, output, EmbeddingOutput(_vector(pooling_params, output)))

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
        _check_task(pooling_task)
        take_options("AsyncLLM.encode()", options)
        output = await self._pooled(prompt, pooling_params, request_id, lora_request, options)
        return _result(PoolingRequestOutput, output, PoolingOutput(_vector(pooling_params, output, normalize=False)))

    async def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        lora_request: AnyLoRA | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Cosine similarity of pairs of texts; see `LLM.score`."""
        first, second = _pairs(text_1, text_2)
        texts = (*first, *second)
        take_options("AsyncLLM.score()", options)
        outputs = await run_all(self._pooled(text, pooling_params, None, lora_request, options) for text in texts)
        return _scores(pooling_params, outputs)

    async def classify(
        self, prompt: Prompt, request_id: str | None = None, *, lora_request: AnyLoRA | None = None, **options: Any
    ) -> ClassificationRequestOutput:
        """Probabilities of the labels of a prompt; see `LLM.classify`."""
        take_options("AsyncLLM.classify()", options)
        return _labels(await self._last(prompt, classifying(), request_id, lora_request, options))

    async def _pooled(
        self,
        prompt: Prompt,
        params: PoolingParams | None,
        request_id: str | None,
        lora: AnyLoRA | None,
        options: dict[str, Any],
    ) -> RequestOutput:
        await self.start()
        return await self._last(prompt, _sampling(self, params), request_id, lora, options)

    async def _last(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: str | None,
        lora: AnyLoRA | None,
        options: dict[str, Any],
    ) -> RequestOutput:
        outputs = [output async for output in self.generate(prompt, sampling, request_id, lora_request=lora, **options)]
        return outputs[-1]
