"""`/v1/chat/completions/derender` and `/v1/completions/derender`: the answers that generated token ids stand for.

The ids pass through the same steps as in the other routes, so that the text, calls and reasoning are the same.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....client.output_processor import SequenceState
from ....client.text.no_tokenizer import needed
from ....core.errors import InvalidRequestError, invalid
from ....core.lora_request import LoRA
from ....core.messages import EngineRequest, TokenDelta, TokenLogprobs
from ....core.model_limits import check_token_ids
from ....core.sampling_params import SamplingParams
from ...body.body_memory import HeldBody
from ...body.reader import documented, read_waiting_body, validated
from ...protect.accounting import charge_call
from ...serving_state import Serving, new_request_id, serving_of
from ..answer import Accepted
from ..chat import chat_choice, old_names
from ..chat_job import chat_plan
from ..chat_messages import normalize_messages
from ..completions import Completions
from ..generation import Choice, PromptFacts
from ..job import now
from ..json_pieces import json_answer
from ..logprobs import ID_PREFIX, pack
from ..protocol import MAX_SEQUENCES, ChatCompletionRequest, CompletionRequest, SamplingFields
from ..tokenize import num_text_ids, visible_adapter
from .protocol import DerenderChatRequest, DerenderCompletionRequest, GeneratedChoice, GenerateResponse

router = APIRouter()

SLICE = 64
"""Tokens that are made text in one go, in about a millisecond."""

BodyT = TypeVar("BodyT", bound=SamplingFields)


@router.post("/v1/chat/completions/derender", response_model=None, openapi_extra=documented(DerenderChatRequest))
async def derender_chat(request: Request) -> Response:
    """The chat completion of a generate response."""
    body, held = await read_waiting_body(request, DerenderChatRequest)
    await charge_call(request)
    lora = await visible_adapter(request, body.model)
    serving = serving_of(request)
    answer = body.generate_response
    tokenizer = needed(await _tokenizer(serving, lora), "generate_response: text", "generate_response")
    _check_choices(serving, tokenizer, [answer], "generate_response")
    params, make_parser = SamplingParams(), None
    prompt = body.prompt_token_ids
    check_token_ids("prompt_token_ids", prompt or (), num_text_ids(serving, tokenizer))
    if body.chat_request is None:
        chat = ChatCompletionRequest.model_construct(messages=[])
    else:
        with _named_after("chat_request"):
            chat = _read(serving, body.chat_request, ChatCompletionRequest)
            accepted = await _accepted(request, serving, chat, lora, held)
            with old_names(chat):
                plan = await chat_plan(accepted, chat, normalize_messages(chat.messages), prompt=prompt or None)
        params, prompt, make_parser = plan.params, plan.prompt, plan.make_parser
    choices: list[dict[str, Any]] = []
    for index, given in enumerate(answer.choices):
        place = f"generate_response.choices[{index}]"
        choice = await _choice(serving, lora, given, params, prompt or [], tokenizer, place)
        chat.logprobs, chat.top_logprobs = given.logprobs is not None, _num_top(given)
        chat.return_token_ids = chat.return_draft_status = None  # the client has the ids
        choices.append(chat_choice(chat, make_parser, given.index, choice))
    content: dict[str, Any] = {
        "id": answer.request_id or new_request_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model or serving.config.served_model_names[0],
        "system_fingerprint": None,
        "choices": choices,
        "usage": _usage(len(prompt or ()) if body.prompt_tokens is None else body.prompt_tokens, [answer]),
    }
    if answer.prompt_logprobs is not None:
        content["prompt_logprobs"] = answer.prompt_logprobs
    return await json_answer(content)


@router.post("/v1/completions/derender", response_model=None, openapi_extra=documented(DerenderCompletionRequest))
async def derender_completion(request: Request) -> Response:
    """The completion of generate responses, one for each prompt."""
    body, _ = await read_waiting_body(request, DerenderCompletionRequest)
    await charge_call(request)
    lora = await visible_adapter(request, body.model)
    serving, answers = serving_of(request), body.generate_responses
    tokenizer = needed(await _tokenizer(serving, lora), "generate_responses: text", "generate_responses")
    _check_choices(serving, tokenizer, answers, "generate_responses")
    counts = body.prompt_tokens or [0] * len(answers)
    if len(counts) != len(answers):
        raise invalid("prompt_tokens", f"has {len(counts)} entries for {len(answers)} generate_responses")
    params = SamplingParams()
    completion = CompletionRequest.model_construct(prompt="")
    if body.completion_request is not None:
        with _named_after("completion_request"):
            completion = _read(serving, body.completion_request, CompletionRequest)
            if completion.echo:
                raise invalid("echo", "is not available: the answers have no prompt")
            params = completion.sampling_params(await serving.llm.sampling_defaults.of(lora), max_tokens=None)
    completion.return_token_ids = completion.return_draft_status = None
    choices: list[dict[str, Any]] = []
    for number, answer in enumerate(answers):
        for index, given in enumerate(answer.choices):
            place = f"generate_responses[{number}].choices[{index}]"
            choice = await _choice(serving, lora, given, params, [], tokenizer, place)
            completion.logprobs = None if given.logprobs is None else _num_top(given)
            completion.prompt_logprobs = None
            writer = Completions(tokenizer, completion, 1)
            content = writer.choice(len(choices), choice, PromptFacts())
            if answer.prompt_logprobs is not None:
                content["prompt_logprobs"] = answer.prompt_logprobs
            choices.append(content)
    first_id = answers[0].request_id if answers else None
    return await json_answer(
        {
            "id": first_id or new_request_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or serving.config.served_model_names[0],
            "system_fingerprint": None,
            "choices": choices,
            "usage": _usage(sum(counts), answers),
        }
    )


async def _tokenizer(serving: Serving, lora: LoRA | None) -> Any:
    return (await serving.llm.requests.processor_of(lora)).tokenizer


@contextmanager
def _named_after(field: str) -> Iterator[None]:
    """Let errors name fields of the request in `field`."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = field if error.param is None else f"{field}.{error.param}"
        raise


def _read(serving: Serving, content: dict[str, Any], model: type[BodyT]) -> BodyT:
    """The request that was rendered."""
    body = validated(content, model, strict=serving.config.strict_fields)
    body.check()
    return body


async def _accepted(
    request: Request, serving: Serving, chat: ChatCompletionRequest, lora: LoRA | None, held: HeldBody
) -> Accepted[ChatCompletionRequest]:
    defaults = await serving.llm.sampling_defaults.of(lora)
    return Accepted(request, serving, chat, lora, chat.model or "", defaults, now(), held)


def _check_choices(serving: Serving, tokenizer: Any, answers: Sequence[GenerateResponse], field: str) -> None:
    """Refuse more choices than a request may ask for, and ids that no sequence has."""
    if not answers or not all(answer.choices for answer in answers):
        raise invalid(field, "must have choices")
    count = sum(len(answer.choices) for answer in answers)
    if count > MAX_SEQUENCES:
        raise invalid(field, f"has {count} choices; at most {MAX_SEQUENCES} are taken")
    longest = serving.llm.info.max_model_len
    for answer in answers:
        for choice in answer.choices:
            if len(choice.token_ids) > longest:
                raise invalid(field, f"has a choice of {len(choice.token_ids)} tokens; at most {longest} are taken")
            check_token_ids(field, choice.token_ids, num_text_ids(serving, tokenizer))


async def _choice(
    serving: Serving,
    lora: LoRA | None,
    given: GeneratedChoice,
    params: SamplingParams,
    prompt: list[int],
    tokenizer: Any,
    place: str,
) -> Choice:
    """Text and log-probabilities of a choice."""
    ids, reason, stop = given.token_ids, given.finish_reason, given.stop_reason
    logprobs = None if given.logprobs is None else _positions(given, place, num_text_ids(serving, tokenizer))
    state = SequenceState(0, EngineRequest("", prompt, _text_params(params, logprobs is not None)), tokenizer)
    ends = {*(await serving.llm.requests.processor_of(lora)).eos_token_ids, *(params.stop_token_ids or ())}
    by_token = reason == "stop" and not isinstance(stop, str) and bool(ids) and ids[-1] in ends
    for start in range(0, len(ids), SLICE):
        is_last = start + SLICE >= len(ids)
        delta = TokenDelta("", ids[start : start + SLICE], finish_reason="stop" if is_last and by_token else None)
        delta.logprobs = logprobs and logprobs[start : start + SLICE]
        if state.update(delta):
            break
        await asyncio.sleep(0)
    if state.finish_reason is None:
        state.finish(reason or "stop", stop)
    output = state.take(delta=False)
    assert output is not None, "all that there is"
    return Choice(
        0,
        [output.text],
        output.token_ids,
        list(map(pack, output.logprobs or ())),
        finish_reason=reason,
        stop_reason=output.stop_reason if stop is None else stop,
    )


def _text_params(params: SamplingParams, with_logprobs: bool) -> SamplingParams:
    """The parameters that decide on a text: the others may be long lists."""
    return SamplingParams(
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        min_tokens=params.min_tokens,
        max_tokens=None,
        logprobs=0 if with_logprobs else None,
    )


def _positions(given: GeneratedChoice, place: str, num_ids: int) -> list[TokenLogprobs]:
    """Log-probabilities of a choice by token ids.

    Raises:
        InvalidRequestError: they are not those of the choice's tokens, named by ids, or an id is not below `num_ids`:
            texts of tokens are remembered.
    """
    content = (given.logprobs or {}).get("content")
    if not isinstance(content, list) or len(content) != len(given.token_ids):
        raise invalid(f"{place}.logprobs", "must have a content with an entry for each of token_ids")
    positions = []
    for token_id, entry in zip(given.token_ids, content, strict=True):
        own, top = _entry(entry, place), (entry.get("top_logprobs") or ())
        if own[0] != token_id:
            raise invalid(f"{place}.logprobs", f"names {own[0]} at the place of token {token_id}")
        if not isinstance(top, list | tuple):
            raise invalid(f"{place}.logprobs", "top_logprobs must be a list")
        others = [_entry(each, place) for each in top]
        ids = [each[0] for each in others]
        check_token_ids(f"{place}.logprobs", ids, num_ids)
        rank = 1 + (ids.index(token_id) if token_id in ids else len(ids))
        positions.append(TokenLogprobs([token_id, *ids], [own[1], *(each[1] for each in others)], rank))
    return positions


def _entry(entry: Any, place: str) -> tuple[int, float]:
    """Token id and log-probability of an entry."""
    token = entry.get("token") if isinstance(entry, dict) else None
    value = entry.get("logprob") if isinstance(entry, dict) else None
    number = token.removeprefix(ID_PREFIX) if isinstance(token, str) and token.startswith(ID_PREFIX) else ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number.isascii() and number.isdigit() and len(number) < 10 and is_number):
        raise invalid(f"{place}.logprobs", f"entries need a token named {ID_PREFIX}N and a logprob")
    return int(number), float(value or 0.0)


def _num_top(given: GeneratedChoice) -> int:
    """Largest number of alternatives at a position."""
    content = (given.logprobs or {}).get("content")
    return max((len(entry.get("top_logprobs") or ()) for entry in content or ()), default=0)


def _usage(prompt_tokens: int, answers: Sequence[GenerateResponse]) -> dict[str, int]:
    completion = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion,
        "completion_tokens": completion,
    }
