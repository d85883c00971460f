"""`/` and `/console`, which are open and hold no data, and `/admin/v1/stats`, which admins alone may read."""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from .... import __version__
from ..serving_state import require_admin
from .assets import Assets
from .statistics import MAX_HISTORY, Statistics
from .stats_schema import Stats

router = APIRouter()
_ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/models"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/health", "/version", "/metrics", "/openapi.json", "/console"),
)
"""Named to a program that asks for `/`; `/openapi.json` has all."""


@router.get("/", include_in_schema=False, response_model=None)
async def root(request: Request) -> Response:
    """A browser goes to the console; a program gets the routes."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("console", 307, {"Vary": "Accept"})  # relative: wherever a proxy has put it
    return JSONResponse({"name": "Outrider", "version": __version__, "routes": _ROUTES}, headers={"Vary": "Accept"})


@router.get("/console", include_in_schema=False, response_model=None)
async def console(request: Request) -> Response:
    """The page."""
    return _assets().page.respond(request, "no-cache")


@router.get("/console/", include_in_schema=False, response_model=None)
async def console_with_slash() -> Response:
    """Redirect to the page, wherever a proxy has put it: its links are relative."""
    return RedirectResponse("../console", 308)


@router.get("/console/assets/{version}/{name:path}", include_in_schema=False, response_model=None)
async def asset(request: Request, version: str, name: str) -> Response:
    """A file that belongs to the page."""
    found = _assets().find(version, name)
    if found is None:
        raise HTTPException(404)
    return found.respond(request, "public, max-age=31536000, immutable")


@router.get("/admin/v1/stats", tags=["admin"], response_model=None, responses={200: {"model": Stats}})
async def stats(
    request: Request,
    history: Annotated[int, Query(ge=0, le=MAX_HISTORY, description="Seconds of history to include")] = 0,
) -> Response:
    """Statistics of the server: throughput, latencies, queue, memory, adapters, speculation."""
    require_admin(request)
    statistics: Statistics = request.app.state.statistics
    content = await (statistics.json_with_history(history) if history else statistics.json())
    return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})


@functools.cache
def _assets() -> Assets:
    """The console's files, read when the page is first requested."""
    return Assets()
