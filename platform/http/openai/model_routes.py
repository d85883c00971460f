"""`GET /v1/models`: cards of the models that a client may use, in the form of OpenAI's API or of Anthropic's."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...core.errors import NotFoundError
from ..anthropic.errors import is_anthropic
from ..anthropic.models_page import model_info, models_page
from ..serving_state import principal_of, serving_of

router = APIRouter()

_BOTH_FORMS = {"Vary": "anthropic-version"}


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """The base model and the adapters that this key may use; with a header `anthropic-version` a page of them."""
    models = serving_of(request).models
    await models.refresh()
    cards = models.seen_by(principal_of(request)).cards()
    page = models_page(cards, request.query_params) if is_anthropic(request.scope) else None
    return JSONResponse(page or {"object": "list", "data": cards}, headers=_BOTH_FORMS)


@router.get("/v1/models/{model:path}", response_model=None)
async def retrieve_model(request: Request, model: str) -> Response:
    """One model's card."""
    models = serving_of(request).models
    view = models.seen_by(principal_of(request))
    await view.discover(model)
    await models.refresh()
    try:
        card = view.card(model)
    except NotFoundError as error:
        raise NotFoundError(error.message + view.suggestion(model), param="model") from None
    return JSONResponse(model_info(card) if is_anthropic(request.scope) else card, headers=_BOTH_FORMS)
