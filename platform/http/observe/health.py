"""Routes that monitoring asks: open to everybody, but for metrics of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .... import __version__
from ...core.errors import AuthenticationError, EngineDeadError
from ..protect.error_responses import EngineUnavailableError, error_json
from ..serving_state import PRINCIPAL, require_admin, serving_of
from .prometheus_metrics import CONTENT_TYPE, OPENMETRICS_TYPE

router = APIRouter()

_OPENMETRICS = "application/openmetrics-text"
"""Type that Prometheus prefers in its `Accept`; clients that do not know it do not write it."""
_GZIP_LEVEL = 5
"""Level of compression: about a tenth of the size, at a few milliseconds for a megabyte."""
_NO_WEIGHT = re.compile(r"q=0(\.0*)?")


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are taken, with the status "paused" if they wait; else 503 with the reason in `status`."""
    serving = serving_of(request)
    state = serving.state
    takes = serving.takes_requests
    problem = serving.tenancy.ledger.problem if takes and serving.tenancy is not None else None
    if takes and problem is None:
        return JSONResponse({"status": state})
    state = state if problem is None else "ledger_unavailable"
    message = f"The server is {state}" if problem is None else f"Requests cannot be accounted for: {problem}"
    content = {"status": state} | error_json(message, EngineUnavailableError.type)
    return JSONResponse(content, 503, {"Retry-After": "5"})


@router.api_route("/ping", methods=["GET", "POST"], response_model=None, include_in_schema=False)
async def ping(request: Request) -> Response:
    """`/health` under the name that SageMaker uses."""
    return await health(request)


@router.get("/load", response_model=None)
async def load(request: Request) -> Response:
    """Number of sequences that run or wait."""
    queue = serving_of(request).queue
    return JSONResponse({"server_load": queue.num_in_engine + queue.num_for_slots})


@router.get("/version", response_model=None)
async def version() -> Response:
    """The version of Outrider."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus exposition. With tenants it has their names, so an admin's key is needed."""
    serving = serving_of(request)
    if serving.tenancy is not None and not serving.config.open_metrics:
        _check_admin(request)
    await serving.update_metrics()
    serving.metrics.engine_restarts = serving.llm.num_restarts
    with contextlib.suppress(EngineDeadError):  # it has not started
        serving.metrics.max_loras = serving.llm.info.max_loras
    wants_openmetrics = _OPENMETRICS in request.headers.get("accept", "").lower()
    content = serving.metrics.render_openmetrics() if wants_openmetrics else serving.metrics.render()
    content_type = OPENMETRICS_TYPE if wants_openmetrics else CONTENT_TYPE
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if accepts_gzip(request.headers.get("accept-encoding", "")):
        content = await asyncio.to_thread(gzip.compress, content, _GZIP_LEVEL)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers)


def accepts_gzip(header: str) -> bool:
    """True if an `Accept-Encoding` takes gzip (RFC 9110, 12.5.3)."""
    taken: dict[str, bool] = {}
    for entry in header.lower().split(","):
        coding, _, weight = entry.replace(" ", "").partition(";")
        taken[coding] = not _NO_WEIGHT.fullmatch(weight)
    return taken.get("gzip", taken.get("*", False))


def _check_admin(request: Request) -> None:
    """Refuse callers without an admin's key, as `Authentication` and `require_admin` do for guarded routes."""
    if getattr(request.state, PRINCIPAL, None) is None:
        raise AuthenticationError("Metrics need an admin's API key on this server")
    require_admin(request)
