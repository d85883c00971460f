"""Routes that monitoring asks: open to everybody, but for metrics of tenants."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .... import __version__
from ...core.errors import AuthenticationError, EngineDeadError
from ..protect.error_responses import EngineUnavailableError, error_json
from ..serving_state import PRINCIPAL, require_admin, serving_of
from .prometheus_metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are taken; else 503 with the reason in `status`."""
    serving = serving_of(request)
    state = serving.state
    problem = serving.tenancy.ledger.problem if state == "ready" and serving.tenancy is not None else None
    if state == "ready" and problem is None:
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
    return JSONResponse({"server_load": queue.num_in_engine + queue.num_for_places})


@router.get("/version", response_model=None)
async def version() -> Response:
    """The version of Outrider."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus exposition. Where there are tenants it has their names, so an admin's key is needed."""
    serving = serving_of(request)
    if serving.tenancy is not None and not serving.config.open_metrics:
        _check_admin(request)
    await serving.update_metrics()
    serving.metrics.engine_restarts = serving.llm.num_restarts
    with contextlib.suppress(EngineDeadError):  # it has not started
        serving.metrics.max_loras = serving.llm.info.max_loras
    return Response(serving.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _check_admin(request: Request) -> None:
    """Refuse callers without an admin's key, as the gate and `require_admin` do for guarded routes."""
    if getattr(request.state, PRINCIPAL, None) is None:
        raise AuthenticationError("Metrics need an admin's API key on this server")
    require_admin(request)
