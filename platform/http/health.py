"""`/health`, `/version` and `/metrics`: open to everybody, as monitoring expects."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ... import __version__
from ..core.errors import OutriderError
from .metrics import CONTENT_TYPE
from .serving import serving_of

logger = logging.getLogger(__name__)
router = APIRouter()

STATS_TIMEOUT = 2.0
"""Seconds that the engine gets for a snapshot; after that the last one is shown again."""


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are taken; else 503 with the reason in `status`."""
    state = serving_of(request).state
    if state == "ready":
        return JSONResponse({"status": state})
    error = {"message": f"The server is {state}", "type": "ServiceUnavailableError", "param": None, "code": None}
    return JSONResponse({"status": state, "error": error}, 503, {"Retry-After": "5"})


@router.get("/version", response_model=None)
async def version() -> Response:
    """The version of Outrider."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    serving = serving_of(request)
    try:
        serving.metrics.update(await asyncio.wait_for(serving.llm.stats(), STATS_TIMEOUT))
    except (OutriderError, TimeoutError) as error:
        logger.debug("no snapshot from the engine: %s", error)
    return Response(serving.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
