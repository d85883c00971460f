"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import InvalidRequestError, PromptTooLongError
from ...core.outputs import CompletionOutput
from ...core.sampling_params import SamplingParams
from ..body.reader import documented, read_waiting_body
from ..protect.accounting import check_call, limit_headers
from ..serving import Serving, new_request_id, principal_of, serving_of
from .adapter_choice import choose_adapter, discover_adapters
from .chat_messages import normalize_messages
from .event_stream import Chunk, ChunkWriter, dumps, stream_response, until_disconnect
from .generation import Choice, Collected, collect, draft_fields, generate
from .job import Event, Job, now
from .json_pieces import json_answer
from .logprobs import chat_logprobs, pack, prompt_logprobs
from .protocol import ChatCompletionRequest

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, openapi_extra=documented(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival = now()
    serving, principal = serving_of(request), principal_of(request)
    body, held = await read_waiting_body(request, ChatCompletionRequest, serving.config.max_body_bytes)
    body.check()
    models = serving.models.seen_by(principal)
    await discover_adapters(models, body)
    lora, model = choose_adapter(models, body)
    serving.check_ready()
    check_call(request)
    defaults = await serving.llm.sampling_defaults.of(lora)
    params = _sampling_params(serving, body, defaults)
    prompt = await serving.chat_prompt(normalize_messages(body.messages), body, lora)
    max_tokens_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    _check_length(params, serving.llm.info.max_model_len, len(prompt), max_tokens_field)
    job = Job(
        new_request_id("chatcmpl"),
        [prompt],
        params,
        lora,
        body.priority or 0,
        body.cache_salt or "",
        default_max_tokens=defaults.get("max_tokens"),
        max_tokens_field=max_tokens_field,
        principal=principal,
        endpoint="/v1/chat/completions",
        model=model,
        arrival=arrival,
        on_admitted=held.close,
    )
    fixed = {
        "id": job.request_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }
    events = generate(serving, job)
    if body.stream:
        writer = ChunkWriter(fixed, body.stream_options, bool(body.return_metrics))
        return await stream_response(request, events, _ChatChunks(body), writer)
    collected = await until_disconnect(request, collect(events, job))
    return await json_answer(fixed | _answer(body, collected), limit_headers(request))


def _check_length(params: SamplingParams, limit: int, num_prompt_tokens: int, max_tokens_field: str) -> None:
    """Check the context length in the words of a chat; prompts that are only scored are left to the engine's client."""
    max_tokens = params.max_tokens or 1
    if num_prompt_tokens + max_tokens > limit and not (
        num_prompt_tokens == limit and params.prompt_logprobs is not None
    ):
        param = "messages" if num_prompt_tokens >= limit else max_tokens_field
        raise PromptTooLongError.of(limit, num_prompt_tokens, max_tokens, prompt="messages", param=param)


def _sampling_params(serving: Serving, body: ChatCompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    limit = serving.llm.info.max_logprobs
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= limit:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {limit}], got {body.top_logprobs}", param="top_logprobs"
        )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling_params(defaults, logprobs=logprobs, max_tokens=max_tokens)


def _answer(body: ChatCompletionRequest, collected: Collected) -> dict[str, Any]:
    prompt = collected.prompts[0]
    answer: dict[str, Any] = {
        "choices": [_choice(body, i, choice) for i, choice in enumerate(collected.choices)],
        "usage": collected.totals.usage(),
    }
    if prompt.logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = prompt.token_ids
    if body.return_metrics:
        answer["metrics"] = collected.totals.metrics()
    return answer


def _choice(body: ChatCompletionRequest, index: int, choice: Choice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice.token_ids, choice.logprobs, body.top_logprobs or 0) if body.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        result["token_ids"] = choice.token_ids
    if body.return_draft_status:
        result |= draft_fields(choice)
    return result


class _ChatChunks:
    """`choices` of chat.completion.chunk objects. A choice's first chunk has the role."""

    def __init__(self, body: ChatCompletionRequest) -> None:
        self._body = body
        self._started: set[int] = set()
        self._plain = not (body.logprobs or body.return_token_ids or body.return_draft_status)

    def choices(self, event: Event) -> list[Chunk]:
        """See ChunkEncoder."""
        chunks: list[Chunk] = []
        for output in event.output.outputs:
            if output.index not in self._started:
                self._started.add(output.index)
                chunks.append(self._first(output.index, event))
            if not self._plain or output.finish_reason is not None:
                chunks.append(self._full(output))
            elif output.text:
                chunks.append(
                    f'{{"index":{output.index},"delta":{{"content":{dumps(output.text)}}},'
                    '"logprobs":null,"finish_reason":null}'
                )
        return chunks

    def _first(self, index: int, event: Event) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = event.output.prompt_token_ids
        return choice

    def _full(self, output: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output) if self._body.logprobs and output.token_ids else None,
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
        if self._body.return_draft_status:
            choice |= draft_fields(output)
        return choice

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        entries = list(map(pack, output.logprobs or ()))
        return chat_logprobs(output.token_ids, entries, self._body.top_logprobs or 0)
