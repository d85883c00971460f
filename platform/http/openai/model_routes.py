"""`GET /v1/models`: cards of the models that a client may use."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..serving_state import principal_of, serving_of

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """The base model and the adapters that this key may use."""
    models = serving_of(request).models
    await models.refresh()
    return JSONResponse({"object": "list", "data": models.seen_by(principal_of(request)).cards()})


@router.get("/v1/models/{model:path}", response_model=None)
async def retrieve_model(request: Request, model: str) -> Response:
    """One model's card."""
    models = serving_of(request).models
    view = models.seen_by(principal_of(request))
    await view.discover(model)
    await models.refresh()
    return JSONResponse(view.card(model))
