"""The routes of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequestError, invalid
from ...body.reader import documented
from ...protect.accounting import charge_call
from ...serving_state import principal_of, serving_of
from ..answer import Accepted, accept
from ..chat_job import chat_job
from ..json_pieces import json_answer
from .answer import ResponseAnswer
from .conversation import Item, parse_items, to_messages
from .protocol import ResponsesRequest
from .store import Stored
from .translation import chat_request, function_places, in_own_names

router = APIRouter()

PATH = "/v1/responses"


@router.post(PATH, response_model=None, openapi_extra=documented(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer a conversation."""
    accepted = await accept(request, ResponsesRequest)
    items = _conversation(accepted)
    chat = chat_request(accepted.body, strict=accepted.serving.config.strict_fields)
    try:
        messages = to_messages(items, accepted.body.instructions)
        thinks = chat.reasoning_effort not in (None, "none")
        made = await chat_job(
            accepted,
            chat,
            messages,
            prefix="resp_",
            endpoint=PATH,
            format_field="text.format",
            parses_reasoning=thinks,
        )
        answer = ResponseAnswer(accepted, made, items)
        return await accepted.run(made.job, answer if accepted.body.stream else None, answer.whole)
    except InvalidRequestError as error:
        raise in_own_names(error, function_places(accepted.body.tools)) from error


def _conversation(accepted: Accepted[ResponsesRequest]) -> list[Item]:
    """Items of the previous response, if one is named, and of the request."""
    body, store = accepted.body, accepted.serving.responses
    before: list[Item] = []
    tenant = principal_of(accepted.request).tenant
    if body.previous_response_id is not None:
        previous = store.get(tenant, body.previous_response_id, "previous_response_id")
        status = previous.response["status"]
        if status not in ("completed", "incomplete"):
            raise InvalidRequestError(f"previous_response_id: that response is {status}", param="previous_response_id")
        before = previous.conversation()
    items = [*before, *parse_items(body.input, before, lambda: store.items(tenant))]
    if body.is_stored:
        store.check(items)
    return items


async def _stored(request: Request, response_id: str) -> Stored:
    await charge_call(request)
    return serving_of(request).responses.get(principal_of(request).tenant, response_id)


@router.get(PATH + "/{response_id}", response_model=None)
async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
    """A stored response."""
    if stream:
        raise invalid("stream", "is not supported: a stored response is given as a whole")
    return await json_answer((await _stored(request, response_id)).response)


@router.delete(PATH + "/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response."""
    await charge_call(request)
    serving_of(request).responses.delete(principal_of(request).tenant, response_id)
    return await json_answer({"id": response_id, "object": "response", "deleted": True})


@router.post(PATH + "/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Abort a response that is being streamed; one that has ended stays as it is."""
    stored, serving = await _stored(request, response_id), serving_of(request)
    if not stored.is_running:
        return await json_answer(stored.response)
    await serving.llm.abort(response_id)
    return await json_answer(stored.response | {"status": "cancelled"})


@router.get(PATH + "/{response_id}/input_items", response_model=None)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Items of the conversation before a stored response's output, in pages."""
    items = (await _stored(request, response_id)).items
    items = items if order == "asc" else items[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if index is None:
            raise invalid("after", "is no id of the response's input items")
        items = items[index + 1 :]
    page = items[:limit]
    answer: dict[str, Any] = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return await json_answer(answer)
