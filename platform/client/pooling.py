"""Work of `embed`, `encode`, `score` and `classify`: hidden states of prompts in place of texts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...models.checkpoint.json_files import read_json
from ..core.errors import InvalidRequestError, NotFoundError, RequestAbortedError, invalid
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

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .llm import LLM

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


def _sampling(info: EngineInfo, params: PoolingParams | None) -> SamplingParams:
    params = params if params is not None else PoolingParams()
    if not isinstance(params, PoolingParams):
        raise invalid("pooling_params", f"must be PoolingParams, got {params!r}")
    return params.sampling(params.pooling or model_pooling(info.model))


def _vector(params: PoolingParams | None, output: RequestOutput, *, normalize: bool = True) -> list[float]:
    if output.pooled is None:
        raise RequestAbortedError("the request was aborted before it had a result; send it again")
    return (params or PoolingParams()).vector(output.pooled, normalize=normalize)


def embedding(output: RequestOutput, params: PoolingParams | None) -> EmbeddingRequestOutput:
    """The result of `embed` for one prompt."""
    return _result(EmbeddingRequestOutput, output, EmbeddingOutput(_vector(params, output)))


def encoding(output: RequestOutput, params: PoolingParams | None) -> PoolingRequestOutput[PoolingOutput]:
    """The result of `encode` for one prompt."""
    return _result(PoolingRequestOutput, output, PoolingOutput(_vector(params, output, normalize=False)))


def classification(output: RequestOutput) -> ClassificationRequestOutput:
    """The result of `classify` for one prompt."""
    if output.pooled is None:
        raise RequestAbortedError("the request was aborted before it had a result; send it again")
    return _result(ClassificationRequestOutput, output, ClassificationOutput(output.pooled))


def _result(kind: type[R], output: RequestOutput, value: Any) -> R:
    return kind(output.request_id, value, output.prompt_token_ids, output.num_cached_tokens)


def check_task(task: str) -> None:
    """Refuse (InvalidRequestError) a task of `encode` that is not served."""
    if task != "embed":
        raise invalid("pooling_task", f"must be 'embed', got {task!r}")


def pairs(text_1: Prompt | Sequence[Prompt], text_2: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
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
    """Cosine of two vectors; 0 if one is zero."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (lengths or 1.0)


def scores(params: PoolingParams | None, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
    """Similarities of pairs of texts; `outputs` has all first texts, and then all second ones."""
    half, scores = len(outputs) // 2, []
    for first, second in zip(outputs[:half], outputs[half:], strict=True):
        similarity = cosine(_vector(params, first), _vector(params, second))
        result = _result(ScoringRequestOutput, first, ScoringOutput(similarity))
        result.prompt_token_ids = [*first.prompt_token_ids, *second.prompt_token_ids]
        scores.append(result)
    return scores


def pool(
    llm: LLM, method: str, prompts: Any, params: Any, lora: Any, use_tqdm: Any, options: dict[str, Any]
) -> tuple[list[RequestOutput], list[PoolingParams | None]]:
    """Outputs of prompts with hidden states, and the parameters of each, for a method of `LLM`."""
    take_options(f"LLM.{method}()", options)
    batch = as_prompts(prompts)
    of_each: list[PoolingParams | None] = for_each("pooling_params", params, len(batch), None)
    sampling = [_sampling(llm.engine_info, one) for one in of_each]
    return llm.generate(batch, sampling, lora, use_tqdm, **options), of_each


async def pool_async(
    llm: AsyncLLM,
    method: str,
    texts: Sequence[Prompt],
    params: PoolingParams | None,
    request_id: str | None,
    lora: AnyLoRA | None,
    options: dict[str, Any],
) -> list[RequestOutput]:
    """Outputs of prompts with hidden states for a method of `AsyncLLM`. With an id there is one prompt."""
    take_options(f"AsyncLLM.{method}()", options)
    info = await llm.start()
    sampling = classifying() if method == "classify" else _sampling(info, params)
    return await run_all(_last_output(llm, text, sampling, request_id, lora, options) for text in texts)


async def _last_output(
    llm: AsyncLLM,
    prompt: Prompt,
    sampling: SamplingParams,
    request_id: str | None,
    lora: AnyLoRA | None,
    options: dict[str, Any],
) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, sampling, request_id, lora_request=lora, **options)]
    return outputs[-1]
