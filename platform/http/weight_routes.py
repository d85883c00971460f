"""Routes that replace the weights of the model in use: operators' calls, with the paths of vLLM and SGLang.

POST /update_weights             one update, or within a session a part of one
POST /start_weight_update        begin a session, whose parts must stay where they are ...
POST /finish_weight_update       ... until this has checked them, and replaced the weights
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..client.weight_updates import MAX_SOURCES, AppliedUpdate, check_version, weight_sources
from ..core.errors import InvalidUserInputError, invalid
from ..core.weight_source import WeightSource
from .body.lenient import RequestModel
from .body.reader import documented, has_body, read_body
from .engine_routes import operators_serving
from .protect.audit_log import audit
from .serving_state import Serving, require_admin, serving_of

router = APIRouter()


class UpdateInfo(RequestModel):
    """Where the weights are."""

    path: str | None = None
    """Folder with config.json and weights, or a safetensors file."""
    weights_path: str | None = None
    """Another name of `path`."""
    shared_memory: str | None = None
    """Name of a safetensors file in /dev/shm."""

    def sources(self) -> list[WeightSource]:
        """The source; InvalidRequestError if not one is given."""
        if self.path is not None and self.weights_path is not None:
            raise invalid("weights_path", "is another name of path: give one of them")
        return weight_sources(self.path or self.weights_path, self.shared_memory)


class UpdateWeightsRequest(UpdateInfo):
    """`POST /update_weights`."""

    update_info: UpdateInfo | None = None
    """The fields above, where vLLM has them."""
    weight_version: str | None = None
    """Label for `GET /weight_info`."""

    def sources(self) -> list[WeightSource]:
        """See UpdateInfo."""
        return super().sources() if self.update_info is None else self.update_info.sources()


class FinishRequest(RequestModel):
    """`POST /finish_weight_update`."""

    weight_version: str | None = None


class UpdateFromDiskRequest(RequestModel):
    """`POST /update_weights_from_disk`, SGLang's."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    """End what runs, with the finish reason "abort", so that no pause is needed."""
    load_format: str | None = None
    """Ignored, like the next three: the files say it."""
    is_async: bool = False
    torch_empty_cache: bool = False
    flush_cache: bool = True


def _optional(model: type[RequestModel]) -> dict[str, object]:
    """The OpenAPI description of a body that may be left out."""
    described = documented(model)
    described["requestBody"]["required"] = False
    return described


@router.post("/start_weight_update", response_model=None)
async def start_weight_update(request: Request) -> Response:
    """Begin an update of the target's weights in several calls of `/update_weights`. A session that was not finished,
    maybe by a trainer that is gone, is dropped."""
    operators_serving(request).weight_session = AppliedUpdate([], draft=False)
    return JSONResponse({"message": "Weight update started"})


@router.post("/start_draft_weight_update", response_model=None, openapi_extra=_optional(UpdateWeightsRequest))
async def start_draft_weight_update(request: Request) -> Response:
    """Begin an update of the drafter's weights as `start_weight_update` does; with a body it is the whole update."""
    serving = operators_serving(request)
    if has_body(request):
        body = await read_body(request, UpdateWeightsRequest)
        await _apply(request, serving, body.sources(), body.weight_version, draft=True)
        return JSONResponse({"message": "Weights updated"})
    serving.weight_session = AppliedUpdate([], draft=True)
    return JSONResponse({"message": "Draft weight update started"})


@router.post("/update_weights", response_model=None, openapi_extra=documented(UpdateWeightsRequest))
async def update_weights(request: Request) -> Response:
    """Replace the target's weights; in a session note where a part of its weights is."""
    serving = operators_serving(request)
    body = await read_body(request, UpdateWeightsRequest)
    sources, session = body.sources(), serving.weight_session
    if session is None:
        await _apply(request, serving, sources, body.weight_version, draft=False)
        return JSONResponse({"message": "Weights updated"})
    if body.weight_version is not None:
        raise invalid("weight_version", "is given to /finish_weight_update")
    if len(session.sources) + len(sources) > MAX_SOURCES:
        raise InvalidUserInputError(f"a weight update has at most {MAX_SOURCES} parts")
    session.sources.extend(sources)
    return JSONResponse({"message": "Weights received"})


@router.post("/finish_weight_update", response_model=None, openapi_extra=_optional(FinishRequest))
async def finish_weight_update(request: Request) -> Response:
    """Replace the weights by those of the session; after an error the old ones go on, and the session has ended."""
    serving = operators_serving(request)
    body = await read_body(request, FinishRequest) if has_body(request) else FinishRequest()
    check_version(body.weight_version)
    session, serving.weight_session = serving.weight_session, None
    if session is None:
        raise InvalidUserInputError("no weight update has been started: call /start_weight_update")
    if not session.sources:
        raise InvalidUserInputError("the weight update has no weights: call /update_weights before it is finished")
    await _apply(request, serving, session.sources, body.weight_version, draft=session.draft)
    return JSONResponse({"message": "Weight update finished", "weight_version": await serving.llm.weight_version()})


@router.post("/update_weights_from_disk", response_model=None, openapi_extra=documented(UpdateFromDiskRequest))
async def update_weights_from_disk(request: Request) -> Response:
    """Replace the target's weights from a folder."""
    serving = operators_serving(request)
    body = await read_body(request, UpdateFromDiskRequest)
    llm, sources = serving.llm, weight_sources(body.model_path, None)
    pauses = body.abort_all_requests and not await llm.is_paused()
    try:
        if pauses:
            await llm.pause_generation("abort")
        await _apply(request, serving, sources, body.weight_version, draft=False)
    finally:
        if pauses:
            await llm.resume_generation()
    return JSONResponse({"success": True, "message": "The weights have been updated", "num_paused_requests": 0})


@router.get("/weight_info", response_model=None)
async def weight_info(request: Request) -> Response:
    """Label of the weights."""
    require_admin(request)
    return JSONResponse({"weight_version": await serving_of(request).llm.weight_version()})


async def _apply(
    request: Request, serving: Serving, sources: list[WeightSource], version: str | None, *, draft: bool
) -> None:
    check_version(version)
    await serving.llm.engine.update_weights(AppliedUpdate(sources, draft), version)
    what = "the drafter's weights" if draft else "the weights"
    await audit(request, f"replaced {what}{'' if version is None else f', version {version}'}")
