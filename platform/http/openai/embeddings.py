"""`/v1/embeddings`, `/v1/score`, `/v1/rerank`, `/classify`: hidden states of texts, how alike they are, and labels."""

from __future__ import annotations

import asyncio
import base64
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...client.pooling import cosine, model_labels, model_pooling
from ...core.errors import InvalidRequestError, RequestAbortedError
from ...core.pooling import PoolingParams, classifying
from ...core.sampling_params import SamplingParams
from ..body.reader import documented
from ..protect.accounting import limit_headers
from .answer import Accepted, accept
from .event_stream import until_disconnect
from .generation import generate
from .job import Job
from .json_pieces import json_answer
from .pooling_protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest

router = APIRouter()


@router.post("/v1/embeddings", response_model=None, openapi_extra=documented(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Embeddings of texts: their pooled hidden states, of length 1."""
    accepted = await accept(request, EmbeddingRequest)
    body, params = accepted.body, accepted.body.params()
    params.normalize = body.normalize
    vectors, job = await _pooled(accepted, body.prompts, params, "/v1/embeddings", "input")
    encode = _base64 if body.encoding_format == "base64" else list
    data = [
        {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
    ]
    return await _answer(accepted, job, object="list", data=data)


@router.post("/v1/score", response_model=None, openapi_extra=documented(ScoreRequest))
@router.post("/score", response_model=None, include_in_schema=False)
async def create_scores(request: Request) -> Response:
    """Cosine similarities of pairs of texts."""
    accepted = await accept(request, ScoreRequest)
    scores, job = await _similarities(accepted, *accepted.body.pairs, "/v1/score", accepted.body.second_name)
    data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
    return await _answer(accepted, job, object="list", data=data)


@router.post("/v1/rerank", response_model=None, openapi_extra=documented(RerankRequest))
@router.post("/v2/rerank", response_model=None, include_in_schema=False)
@router.post("/rerank", response_model=None, include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Documents in the order of their similarity to a query."""
    accepted = await accept(request, RerankRequest)
    body = accepted.body
    texts = body.texts
    documents: list[Any] = texts
    if body.max_tokens_per_doc is not None:
        documents = await accepted.serving.cut(
            texts,
            body.max_tokens_per_doc,
            add_special_tokens=body.add_special_tokens is not False,
            lora=accepted.lora,
        )
    scores, job = await _similarities(accepted, [body.query] * len(texts), documents, "/v1/rerank", "documents")
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    results = []
    for index in order if body.top_n is None else order[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return await _answer(accepted, job, results=results)


@router.post("/classify", response_model=None, openapi_extra=documented(ClassifyRequest))
async def classify(request: Request) -> Response:
    """Probabilities of a classifier's labels, and the most likely label, of texts."""
    accepted = await accept(request, ClassifyRequest)
    found, job = await _run(accepted, accepted.body.prompts, classifying(), list, "/classify", "input")
    names = await asyncio.to_thread(model_labels, accepted.serving.llm.info.model)
    data = []
    for index, probs in enumerate(found):
        best = str(probs.index(max(probs)))
        label = names.get(best, f"LABEL_{best}")
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    return await _answer(accepted, job, object="list", created=int(time.time()), data=data)


async def _similarities(
    accepted: Accepted[Any], first: Sequence[Any], second: Sequence[Any], endpoint: str, field: str
) -> tuple[list[float], Job]:
    """Cosine of each first text with the second one at its index; see `_run`."""
    distinct = list(dict.fromkeys([*first, *second]))  # texts, or tuples of token ids
    vectors, job = await _pooled(accepted, distinct, accepted.body.params(), endpoint, field)
    vector_of = dict(zip(distinct, vectors, strict=True))

    def cosines() -> list[float]:
        return [cosine(vector_of[a], vector_of[b]) for a, b in zip(first, second, strict=True)]

    return await asyncio.to_thread(cosines), job  # 1,024 pairs take about a second


async def _pooled(
    accepted: Accepted[Any], texts: list[Any], params: PoolingParams, endpoint: str, field: str
) -> tuple[list[list[float]], Job]:
    """Vectors of texts; see `_run`."""
    sampling = params.sampling(model_pooling(accepted.serving.llm.info.model))
    return await _run(accepted, texts, sampling, lambda pooled: params.vector(pooled, normalize=True), endpoint, field)


async def _run(
    accepted: Accepted[Any],
    texts: list[Any],
    sampling: SamplingParams,
    vector: Callable[[list[float]], list[float]],
    endpoint: str,
    field: str,
) -> tuple[list[list[float]], Job]:
    """`vector` of each text's pooled numbers, in their order; `field` is the name of the texts in the request.

    Raises:
        OutriderError: a text or a parameter is refused, or the engine fails.
    """
    serving = accepted.serving
    try:
        prompts = await serving.prompts(
            texts, add_special_tokens=accepted.body.add_special_tokens is not False, lora=accepted.lora, field=field
        )
    except InvalidRequestError as error:
        error.param = field
        raise
    job = await accepted.prepare(
        prompts, sampling, prefix=endpoint.rpartition("/")[2], endpoint=endpoint, keeps_output=False
    )

    async def collect() -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        async with aclosing(generate(serving, job)) as events:
            async for event in events:
                if event.output.pooled is not None:
                    found[event.prompt_index] = vector(event.output.pooled)
        return found

    found = await until_disconnect(accepted.request, collect())
    if len(found) < len(prompts):
        raise RequestAbortedError("the request was aborted before it had a result; send it again")
    return [found[index] for index in range(len(prompts))], job


async def _answer(accepted: Accepted[Any], job: Job, **fields: Any) -> Response:
    """The answer with these fields and those of all routes."""
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), job.counts.prompt_tokens)
    answer = {"id": job.request_id, "model": accepted.model, "usage": usage, **fields}
    return await json_answer(answer, limit_headers(accepted.request))


def _base64(vector: list[float]) -> str:
    """Vector as base64 of little-endian float32, the form that OpenAI's client asks for."""
    numbers = array("f", vector)
    return base64.b64encode(numbers.tobytes()).decode()
