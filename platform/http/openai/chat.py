"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import InvalidRequestError
from ...core.outputs import CompletionOutput
from ..body.reader import documented
from .answer import accept, asked_fields, renamed
from .chat_job import chat_job
from .chat_messages import normalize_messages
from .event_stream import Chunk, WithFields, dumps
from .generation import Choice, Collected, metrics_of, usage_of
from .job import Event
from .logprobs import Shown, chat_logprobs, pack, prompt_logprobs
from .protocol import ChatCompletionRequest
from .tools.answers import MakeParser, chunk_deltas, finish_reason, whole_message
from .tools.calls import Delta
from .tools.functions import OLD_NAMES, in_old_form, old_reason, take_functions
from .tools.parser import AnswerParser

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, openapi_extra=documented(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    accepted = await accept(request, ChatCompletionRequest)
    body = accepted.body
    with old_names(body):
        job, make_parser = await chat_job(
            accepted, body, normalize_messages(body.messages), prefix="chatcmpl", endpoint="/v1/chat/completions"
        )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return await accepted.respond(job, kind, _ChatChunks(body, make_parser), partial(_answer, body, make_parser))


@contextmanager
def old_names(body: ChatCompletionRequest) -> Iterator[None]:
    """Take a request's functions as its tools; errors name the fields that it has."""
    has_old_names = take_functions(body)
    try:
        yield
    except InvalidRequestError as error:
        if has_old_names:
            raise renamed(error, OLD_NAMES) from error
        raise


def _answer(body: ChatCompletionRequest, make_parser: MakeParser | None, collected: Collected) -> dict[str, Any]:
    prompt = collected.prompts[0]
    answer: dict[str, Any] = {
        "choices": [chat_choice(body, make_parser, i, choice) for i, choice in enumerate(collected.choices)],
        "usage": usage_of(collected.job),
    }
    if prompt.logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = prompt.token_ids
    if body.return_metrics:
        answer["metrics"] = metrics_of(collected.job)
    return answer


def chat_choice(
    body: ChatCompletionRequest, make_parser: MakeParser | None, index: int, choice: Choice
) -> dict[str, Any]:
    """A choice of a whole answer."""
    message: dict[str, Any] = {"content": choice.text}
    reason = choice.finish_reason
    if make_parser is not None:
        message, parser = whole_message(choice.text, make_parser)
        reason = finish_reason(reason, parser)
        if body.functions:
            message, reason = in_old_form(message), old_reason(reason)
    result: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", **message, "refusal": None},
        "logprobs": chat_logprobs(choice.token_ids, choice.logprobs, _shown(body)) if body.logprobs else None,
        "finish_reason": reason,
        "stop_reason": choice.stop_reason,
    }
    return result | asked_fields(body, choice)


class _ChatChunks:
    """`choices` of chat.completion.chunk objects. A choice's first chunk has the role."""

    def __init__(self, body: ChatCompletionRequest, make_parser: MakeParser | None) -> None:
        self._body = body
        self._make_parser = make_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._started: set[int] = set()
        self._plain = not (body.logprobs or body.return_token_ids or body.return_draft_status)

    def choices(self, event: Event) -> list[Chunk]:
        """See ChunkEncoder."""
        chunks: list[Chunk] = []
        for output in event.output.outputs:
            if self._make_parser is not None:
                chunks += self._parsed(event, output, self._make_parser)
                continue
            if output.index not in self._started:
                self._started.add(output.index)
                chunks.append(self._first(output.index, event, {"content": ""}))
            if self._body.logprobs:
                chunks += map(self._full, self._without_end(output))
            elif not self._plain or output.finish_reason is not None:
                chunks.append(self._full(output))
            elif output.text:
                chunks.append(
                    f'{{"index":{output.index},"delta":{{"content":{dumps(output.text)}}},'
                    '"logprobs":null,"finish_reason":null}'
                )
        return chunks

    def _without_end(self, output: CompletionOutput) -> list[CompletionOutput]:
        """The output without the token that ended it, and that token, which has no text: clients (guidance) join the
        tokens of a chunk that has content, and take them for it."""
        has_end = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        shows_end = self._body.skip_special_tokens is False or self._body.include_stop_str_in_output
        if not has_end or shows_end or not output.text or len(output.token_ids) < 2:
            return [output]

        def part(tokens: slice) -> dict[str, Any]:
            fields = {name: getattr(output, name) for name in ("token_ids", "logprobs", "drafted", "rejected_drafts")}
            return {name: value and value[tokens] for name, value in fields.items()}

        before = replace(output, finish_reason=None, stop_reason=None, **part(slice(None, -1)))
        return [before, replace(output, text="", **part(slice(-1, None)))]

    def _first(self, index: int, event: Event, delta: Delta) -> Chunk:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", **delta},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            return WithFields(choice, {"prompt_token_ids": event.output.prompt_token_ids})
        return choice

    def _parsed(self, event: Event, output: CompletionOutput, make_parser: MakeParser) -> list[Chunk]:
        """Chunks of an answer with calls or reasoning; what comes with tokens is in the last one of them, which has a
        content only if that is the tokens' text. A choice that begins with a call has no content in its first chunk
        either."""
        deltas, parser = chunk_deltas(output, self._parsers, make_parser)
        reason = finish_reason(output.finish_reason, parser)
        deltas = [_with_null(delta) for delta in deltas]
        if self._body.functions:
            deltas, reason = list(map(in_old_form, deltas)), old_reason(reason)
        if reason is None and not deltas and self._plain:
            return []
        chunks: list[Chunk] = []
        if output.index not in self._started:
            self._started.add(output.index)
            begins_with_call = bool(deltas) and deltas[0].get("content", "") is None
            chunks.append(self._first(output.index, event, deltas.pop(0) if begins_with_call else {"content": ""}))
        *first, last = deltas or [{}]
        is_other_text = self._body.logprobs and last.get("content") != output.text  # some was held back
        if last and (reason is not None or is_other_text):
            first, last = [*first, last], {}
        chunks += [{"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in first]
        return [*chunks, self._full(output, last) | {"finish_reason": reason}]

    def _full(self, output: CompletionOutput, delta: Delta | None = None) -> dict[str, Any]:
        if delta is None:
            delta = {"content": output.text} if output.text else {}
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": delta,
            "logprobs": self._logprobs(output) if self._body.logprobs and output.token_ids else None,
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return choice | asked_fields(self._body, output)

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        entries = list(map(pack, output.logprobs or ()))
        return chat_logprobs(output.token_ids, entries, _shown(self._body))


def _shown(body: ChatCompletionRequest) -> Shown:
    return body.logprob_token_ids or body.top_logprobs or 0


def _with_null(delta: Delta) -> Delta:
    """The delta, with the content that OpenAI's API writes when a call begins."""
    return {"content": None, **delta} if "tool_calls" in delta and "id" in delta["tool_calls"][0] else delta
