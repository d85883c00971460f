"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import InvalidRequestError, OutriderError, PromptTooLongError
from ..adapters.adapter_choice import choose_adapter, discover_adapters
from ..body.reader import documented, read_body
from ..openai.answer import Accepted, accept
from ..openai.chat import Prepared, prepare
from ..openai.event_stream import EventStreamResponse, dumps, until_disconnect
from ..openai.generation import Collected, Totals, collect, generate
from ..openai.job import Event, Job
from ..openai.json_pieces import json_answer
from ..openai.protocol import ChatCompletionRequest
from ..openai.tools.choice import tool_choice_of
from ..protect.accounting import charge_call, limit_headers
from ..protect.error_responses import EngineUnavailableError, event_body
from ..serving_state import principal_of, serving_of
from .blocks import BlockEvents, PlainText, whole_content
from .errors import in_form
from .protocol import CountTokensRequest, MessagesRequest
from .translation import chat_messages, chat_request, renamed

logger = logging.getLogger(__name__)

router = APIRouter()


@router.post("/v1/messages", response_model=None, openapi_extra=documented(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    accepted = await accept(request, MessagesRequest)
    try:
        return await _answer(accepted, chat_request(accepted.body))
    except InvalidRequestError as error:
        raise renamed(error) from error


async def _answer(accepted: Accepted[MessagesRequest], translated: ChatCompletionRequest) -> Response:
    request, serving, body = accepted.request, accepted.serving, accepted.body
    chat: Accepted[ChatCompletionRequest] = replace(cast(Any, accepted), body=translated)
    prepared = await _prepare(chat, body)
    _check_length(len(prepared.prompt), body.max_tokens, serving.llm.info.max_model_len)
    job = chat.job([prepared.prompt], prepared.params, prefix="msg", endpoint="/v1/messages")
    parser = PlainText() if prepared.make_parser is None else prepared.make_parser()
    answer = Answer(job, body, BlockEvents(parser, parallel=translated.parallel_tool_calls is not False))
    events = generate(serving, job)
    if body.stream:
        first = await until_disconnect(request, anext(events))
        return EventStreamResponse(_stream(first, events, answer), events, limit_headers(request))
    collected = await until_disconnect(request, collect(events, job))
    return await json_answer(answer.whole(collected), limit_headers(request))


@router.post("/v1/messages/count_tokens", response_model=None, openapi_extra=documented(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Number of tokens of the prompt that a conversation makes."""
    serving = serving_of(request)
    body = await read_body(request, CountTokensRequest)
    charge_call(request)
    models = serving.models.seen_by(principal_of(request))
    await discover_adapters(models, body)
    lora, _ = choose_adapter(models, body)
    try:
        chat = chat_request(body)
        chat.tools = list(tool_choice_of(chat).tools)
        prompt = await serving.chat_prompt(chat_messages(body), chat, lora)
    except InvalidRequestError as error:
        raise renamed(error) from error
    return await json_answer({"input_tokens": len(prompt)})


async def _prepare(chat: Accepted[ChatCompletionRequest], body: MessagesRequest) -> Prepared:
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    try:
        return await prepare(chat, chat_messages(body), parses_reasoning=thinks)
    except PromptTooLongError as error:
        raise PromptTooLongError(f"prompt is too long: {error.message}", param="messages") from error


def _check_length(num_prompt: int, max_tokens: int, limit: int) -> None:
    """Check the context length in Anthropic's words, by which its clients know to shorten a conversation."""
    if num_prompt >= limit:
        raise PromptTooLongError(f"prompt is too long: {num_prompt} tokens > {limit - 1} maximum", param="messages")
    if num_prompt + max_tokens > limit:
        raise PromptTooLongError(
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {limit}, decrease "
            "input length or `max_tokens` and try again",
            param="max_tokens",
        )


class Answer:
    """One answer, whole or as a stream."""

    def __init__(self, job: Job, body: MessagesRequest, blocks: BlockEvents) -> None:
        self.blocks = blocks
        self._job = job
        self._body = body

    def message(self, content: list[dict[str, Any]], totals: Totals) -> dict[str, Any]:
        """The message object, whose end is not known yet."""
        return {
            "id": self._job.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(totals),
        }

    def whole(self, collected: Collected) -> dict[str, Any]:
        """The message object of a whole answer."""
        [choice] = collected.choices
        content = whole_content([*self.blocks.feed(choice.text), *self.blocks.finish()])
        return self.message(content, collected.totals) | self.end(choice.finish_reason, choice.stop_reason)

    def end(self, reason: str | None, stopped_by: int | str | None) -> dict[str, Any]:
        """Reason of the end.

        Raises:
            EngineUnavailableError: the engine has given the request up.
        """
        if reason == "abort":
            raise EngineUnavailableError("The server has aborted this request; try again")
        if reason == "length":
            return {"stop_reason": "max_tokens"}
        if stopped_by is not None and stopped_by in (self._body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": "tool_use" if self.blocks.has_calls else "end_turn"}


def usage(totals: Totals) -> dict[str, int]:
    """The `usage` object so far. Cached tokens of the prompt are no input tokens, as in Anthropic's API."""
    return {
        "input_tokens": totals.prompt_tokens - totals.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached_tokens,
        "output_tokens": totals.completion_tokens,
    }


async def _stream(first: Event, events: AsyncGenerator[Event], answer: Answer) -> AsyncGenerator[bytes]:
    """Body of a stream, which an error ends with an error event. Its end is told when the request's row is safe."""
    totals = Totals()
    totals.add(first._replace(output=replace(first.output, outputs=[])))
    head = _sse({"type": "message_start", "message": answer.message([], totals)}) + _sse({"type": "ping"})
    end: dict[str, Any] = {}

    def encode(event: Event) -> bytes:
        totals.add(event)
        [output] = event.output.outputs
        told = answer.blocks.feed(output.text)
        if output.finish_reason is not None:
            end.update({"stop_sequence": None} | answer.end(output.finish_reason, output.stop_reason))
            told += answer.blocks.finish()
        return b"".join(map(_sse, told))

    try:
        yield head + encode(first)
        async for event in events:
            data = encode(event)
            if data:
                yield data
        yield _sse({"type": "message_delta", "delta": end, "usage": usage(totals)}) + _sse({"type": "message_stop"})
    except OutriderError as error:
        yield _sse(in_form(event_body(error), error.status)[0])
    except Exception as error:
        logger.exception("a stream ended with an unexpected error")
        with suppress(Exception):
            await events.athrow(error)  # where it comes from this side: the request has failed, not been abandoned
        yield _sse(in_form(event_body(error), 500)[0])


def _sse(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()
