"""`/v1/chat/completions/render` and `/v1/completions/render`: the generate requests of a chat, and of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import invalid
from ....core.sampling_params import SamplingParams
from ....core.structured_outputs import StructuredOutputsParams
from ...body.reader import documented
from ...protect.accounting import charge_call
from ..answer import Accepted, accept
from ..chat import old_names
from ..chat_job import chat_job
from ..chat_messages import normalize_messages
from ..completions import completion_job
from ..job import Job
from ..json_pieces import Slices, json_answer
from ..protocol import ChatCompletionRequest, CompletionRequest, SamplingFields

router = APIRouter()

_UNRENDERED = frozenset(("pooling", "output_kind", "detokenize", "bad_words_token_ids"))
"""Fields of `SamplingParams` that the engine's client sets."""


@router.post("/v1/chat/completions/render", response_model=None, openapi_extra=documented(ChatCompletionRequest))
async def render_chat(request: Request) -> Response:
    """The generate request that a chat stands for."""
    accepted = await accept(request, ChatCompletionRequest)
    body = accepted.body
    _check(body)
    await charge_call(request)
    with old_names(body):
        job, _ = await chat_job(
            accepted, body, normalize_messages(body.messages), prefix="chatcmpl", endpoint="/v1/chat/completions"
        )
    return await json_answer(_generate_request(accepted, job, 0))


@router.post("/v1/completions/render", response_model=None, openapi_extra=documented(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """The generate requests of prompts, one for each."""
    accepted = await accept(request, CompletionRequest)
    body = accepted.body
    _check(body)
    if body.echo:
        raise invalid("echo", "is not available when a request is rendered: the answer has no prompt")
    await charge_call(request)
    job = await completion_job(accepted)

    def make(indices: Sequence[int]) -> list[dict[str, Any]]:
        return [_generate_request(accepted, job, index) for index in indices]

    return await json_answer(Slices(range(len(job.prompts)), make))


def _check(body: SamplingFields) -> None:
    if body.use_beam_search:
        raise invalid("use_beam_search", "is not available when a request is rendered")


def _generate_request(accepted: Accepted[Any], job: Job, index: int) -> dict[str, Any]:
    """Body for `/inference/v1/generate`. The adapters of a sum are there if the request lists them."""
    body = accepted.body
    content: dict[str, Any] = {
        "request_id": job.id_of(index),
        "token_ids": job.prompts[index].token_ids,
        "sampling_params": _params(job.prepared[index].params),
        "model": body.model or accepted.model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options and body.stream_options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": job.priority,
        "features": None,
        "kv_transfer_params": None,
    }
    if body.adapters is not None:
        content["adapters"] = [part if isinstance(part, str) else part.model_dump() for part in body.adapters]
    return content


def _params(params: SamplingParams) -> dict[str, Any]:
    """`sampling_params`, without fields that are not set."""
    content = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value is None or value == [] or field.name in _UNRENDERED:
            continue
        if isinstance(value, StructuredOutputsParams):
            value = _constraint(value)
        elif isinstance(value, dict):
            value = {str(token): bias for token, bias in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        content[field.name] = value
    return content


def _constraint(constraint: StructuredOutputsParams) -> dict[str, Any]:
    fields = dataclasses.asdict(constraint)
    return {name: value for name, value in fields.items() if value and name not in ("source", "ignored")}
