"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import InvalidRequestError, OutriderError, PromptTooLongError
from ..adapters.adapter_choice import choose_adapter, discover_adapters
from ..body.reader import documented, read_body
from ..observe.generations import Counts
from ..openai.answer import Accepted, accept
from ..openai.chat_job import chat_job
from ..openai.event_stream import dumps
from ..openai.generation import Collected
from ..openai.job import Event, Job
from ..openai.json_pieces import json_answer
from ..openai.protocol import ChatCompletionRequest
from ..openai.tools.choice import parse_tool_choice
from ..protect.accounting import charge_call
from ..protect.error_responses import EngineUnavailableError, error_content
from ..serving_state import principal_of, serving_of
from .blocks import BlockEvents, whole_content
from .errors import in_form
from .protocol import CountTokensRequest, MessagesRequest
from .translation import chat_messages, chat_request, in_own_names

router = APIRouter()


@router.post("/v1/messages", response_model=None, openapi_extra=documented(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    accepted = await accept(request, MessagesRequest)
    try:
        return await _answer(accepted, chat_request(accepted.body))
    except InvalidRequestError as error:
        raise in_own_names(error) from error


async def _answer(accepted: Accepted[MessagesRequest], chat: ChatCompletionRequest) -> Response:
    body, messages = accepted.body, chat_messages(accepted.body)
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    try:
        made = await chat_job(
            accepted,
            chat,
            messages,
            prefix="msg",
            endpoint="/v1/messages",
            format_field="output_config.format",
            parses_reasoning=thinks,
        )
    except PromptTooLongError as error:
        raise _too_long(error) from error
    answer = Answer(made.job, body, BlockEvents(made.parser()))
    return await accepted.run(made.job, answer if body.stream else None, answer.whole)


@router.post("/v1/messages/count_tokens", response_model=None, openapi_extra=documented(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Number of tokens of the prompt that a conversation makes."""
    serving = serving_of(request)
    body = await read_body(request, CountTokensRequest)
    await charge_call(request)
    models = serving.models.seen_by(principal_of(request))
    await discover_adapters(models, body)
    lora, _ = choose_adapter(models, body)
    try:
        chat = chat_request(body)
        chat.tools = list(parse_tool_choice(chat).tools)
        prompt = await serving.chat_prompt(chat_messages(body), chat, lora)
    except InvalidRequestError as error:
        raise in_own_names(error) from error
    return await json_answer({"input_tokens": len(prompt)})


def _too_long(error: PromptTooLongError) -> PromptTooLongError:
    """The error in Anthropic's words, by which its clients know to shorten a conversation."""
    assert error.counts is not None
    limit, num_prompt, max_tokens = error.counts
    if num_prompt >= limit:
        message, param = f"prompt is too long: {num_prompt} tokens > {limit - 1} maximum", "messages"
    else:
        message, param = (
            (
                f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {limit}, decrease "
                "input length or `max_tokens` and try again"
            ),
            "max_tokens",
        )
    return PromptTooLongError(message, param=param)


class Answer:
    """One answer: whole, or a stream (see `StreamWriter`)."""

    def __init__(self, job: Job, body: MessagesRequest, blocks: BlockEvents) -> None:
        self._blocks = blocks
        self._job = job
        self._body = body
        self._end: dict[str, Any] | None = None  # None: nothing has been sent yet

    def events(self, event: Event) -> Iterator[str]:
        """See StreamWriter."""
        [output] = event.output.outputs
        if self._end is None:
            self._end = {}
            message = self._message([])
            message["usage"]["output_tokens"] = 0
            yield _sse({"type": "message_start", "message": message})
            yield _sse({"type": "ping"})
        yield from map(_sse, self._blocks.feed(output.text))
        if output.finish_reason is not None:
            self._end = {"stop_sequence": None} | self._ended(output.finish_reason, output.stop_reason)
            yield from map(_sse, self._blocks.finish())

    async def last(self) -> Iterator[str]:
        """See StreamWriter."""
        delta = {"type": "message_delta", "delta": self._end, "usage": usage(self._job.counts)}
        return iter([_sse(delta), _sse({"type": "message_stop"})])

    def close(self) -> None:
        """See StreamWriter."""

    def error(self, error: Exception) -> str:
        """See StreamWriter."""
        status = error.status if isinstance(error, OutriderError) else 500
        return _sse(in_form(error_content(error), status)[0])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message object, whose end is not known yet."""
        return {
            "id": self._job.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(self._job.counts),
        }

    async def whole(self, collected: Collected) -> dict[str, Any]:
        """The message object of a whole answer."""
        [choice] = collected.choices
        content = whole_content([*self._blocks.feed(choice.text), *self._blocks.finish()])
        ended = self._ended(choice.finish_reason, choice.stop_reason)
        if ended["stop_reason"] == "tool_use" and not any(block["type"] == "tool_use" for block in content):
            ended["stop_reason"] = "end_turn"  # the arguments are no object
        return self._message(content) | ended

    def _ended(self, reason: str | None, stopped_by: int | str | None) -> dict[str, Any]:
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
        return {"stop_reason": "tool_use" if self._blocks.has_calls else "end_turn"}


def usage(counts: Counts) -> dict[str, int]:
    """The `usage` object so far. Cached tokens of the prompt are no input tokens, as in Anthropic's API."""
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
    }


def _sse(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n"
