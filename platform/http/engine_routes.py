"""Routes that pause the engine, put it to sleep, empty its prefix cache and list the sources of its events: operators'
calls, with vLLM's paths."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .body.lenient import RequestModel
from .body.reader import documented, has_body, read_body
from .protect.audit_log import audit
from .protect.hardening import check_origin
from .serving_state import Serving, require_admin, serving_of

router = APIRouter()


@router.post("/sleep", response_model=None)
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    """Refuse new requests, let the running ones finish, and free memory: 1 that of the KV cache, 2 the weights' too."""
    serving = operators_serving(request)
    await serving.llm.sleep(level)
    await audit(request, f"put the engine to sleep, level {level}")
    return await _state(serving)


@router.post("/wake_up", response_model=None)
async def wake_up(request: Request) -> Response:
    """Take requests again; after level 2 the weights and the adapters are loaded first."""
    serving = operators_serving(request)
    await serving.llm.wake_up()
    await audit(request, "woke the engine up")
    return await _state(serving)


@router.get("/is_sleeping", response_model=None)
async def is_sleeping(request: Request) -> Response:
    """State of the engine: asleep or not."""
    require_admin(request)
    return await _state(serving_of(request))


PauseMode = Literal["abort", "wait", "keep"]


class PauseRequest(RequestModel):
    """`POST /pause`, in the query as in vLLM, or in a body; `AsyncLLM.pause_generation` describes the fields."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False


_PAUSE_BODY = documented(PauseRequest)
_PAUSE_BODY["requestBody"]["required"] = False


@router.post("/pause", response_model=None, openapi_extra=_PAUSE_BODY)
async def pause(
    request: Request, mode: PauseMode = "abort", clear_cache: bool = True, wait_for_inflight_requests: bool = False
) -> Response:
    """Compute nothing until `/resume`: requests that run are aborted, finished first, or kept as they are, and new ones
    wait."""
    serving = operators_serving(request)
    how = PauseRequest(mode=mode, clear_cache=clear_cache, wait_for_inflight_requests=wait_for_inflight_requests)
    if has_body(request):
        how = how.model_copy(update=(await read_body(request, PauseRequest)).model_dump(exclude_unset=True))
    await serving.llm.pause_generation(**how.model_dump())
    await audit(request, f"paused generation, mode {how.mode}")
    return JSONResponse({"status": "paused"})


@router.post("/resume", response_model=None)
async def resume(request: Request) -> Response:
    """End the pause; without one nothing happens."""
    serving = operators_serving(request)
    await serving.llm.resume_generation()
    await audit(request, "resumed generation")
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused", response_model=None)
async def is_paused(request: Request) -> Response:
    """Report whether the engine is paused."""
    require_admin(request)
    return JSONResponse({"is_paused": await serving_of(request).llm.is_paused()})


@router.post("/reset_prefix_cache", response_model=None)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes of prompts that no request uses; `success` is true when nothing is cached any
    more."""
    serving = operators_serving(request)
    success = await serving.llm.reset_prefix_cache()
    await audit(request, f"emptied the prefix cache{'' if success else ', but for what requests use'}")
    return JSONResponse({"success": success})


@router.get("/kv_event_sources", response_model=None)
async def kv_event_sources(request: Request) -> Response:
    """Addresses of the engine's KV events, with vLLM's fields; [] if none are published. The engine that answers is the
    present one: an address with port 0 changes when it is started again."""
    require_admin(request)
    sources = await serving_of(request).llm.kv_event_sources()
    return JSONResponse([asdict(source) for source in sources])


def operators_serving(request: Request) -> Serving:
    """The server's shared objects, for an operator.

    Raises:
        PermissionDeniedError: the key is no operator's, or a page of another site has made a browser post this. There
            is no body whose type would make the browser ask first.
    """
    require_admin(request)
    check_origin(request)
    return serving_of(request)


async def _state(serving: Serving) -> Response:
    return JSONResponse({"is_sleeping": await serving.llm.is_sleeping()})
