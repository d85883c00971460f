"""`/v1/models`, and what admins may do with adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..core.errors import AdapterError, InvalidUserInputError
from .body import documented, read_body
from .protocol import LoadAdapterRequest, PinAdapterRequest, UnloadAdapterRequest
from .serving import Serving, require_admin, serving_of

router = APIRouter()

MAX_ADAPTER_NAME = 256
"""Characters."""


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """The base model and the adapters."""
    models = serving_of(request).models
    await models.refresh()
    return JSONResponse({"object": "list", "data": models.cards()})


@router.get("/v1/models/{model:path}", response_model=None)
async def retrieve_model(request: Request, model: str) -> Response:
    """One model's card."""
    models = serving_of(request).models
    await models.discover(model)
    await models.refresh()
    return JSONResponse(models.card(model))


@router.post("/v1/load_lora_adapter", response_model=None, openapi_extra=documented(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Register an adapter from a folder or another source that this server allows."""
    require_admin(request)
    serving = serving_of(request)
    body = await read_body(request, LoadAdapterRequest, serving.config.max_body_bytes)
    _check_new_name(body.lora_name)
    for field in ("lora_path", "draft_path"):
        if getattr(body, field) == "":
            raise InvalidUserInputError(f"{field} must not be empty", param=field)
    serving.check_ready()
    serving.models.check_free(body.lora_name, load_inplace=body.load_inplace)
    admitted = await serving.adapter_policy.admit(body)
    await serving.models.load(admitted.request, load_inplace=body.load_inplace, pinned=body.pinned, root=body.lora_path)
    try:
        await serving.adapter_policy.check_again(admitted)
    except AdapterError:
        await serving.models.unload(body.lora_name, "abort")
        raise
    return _success(body.lora_name, "added")


@router.post("/v1/unload_lora_adapter", response_model=None, openapi_extra=documented(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Take an adapter away."""
    require_admin(request)
    serving = serving_of(request)
    body = await read_body(request, UnloadAdapterRequest, serving.config.max_body_bytes)
    serving.check_ready()
    await serving.models.unload(body.lora_name, body.mode)
    return _success(body.lora_name, "removed")


@router.post("/v1/pin_lora_adapter", response_model=None, openapi_extra=documented(PinAdapterRequest))
async def pin_adapter(request: Request) -> Response:
    """Keep an adapter on the device."""
    serving, name = await _pinning(request)
    await serving.models.set_pinned(name, True)
    return _success(name, "pinned")


@router.post("/v1/unpin_lora_adapter", response_model=None, openapi_extra=documented(PinAdapterRequest))
async def unpin_adapter(request: Request) -> Response:
    """Let an adapter go when others need its place."""
    serving, name = await _pinning(request)
    await serving.models.set_pinned(name, False)
    return _success(name, "unpinned")


async def _pinning(request: Request) -> tuple[Serving, str]:
    require_admin(request)
    serving = serving_of(request)
    body = await read_body(request, PinAdapterRequest, serving.config.max_body_bytes)
    serving.check_ready()
    return serving, body.lora_name


def _check_new_name(name: str) -> None:
    """A new name must be one that people can read and send. It may look like a weighted sum ("a:0.7+b:0.3"): a whole
    name always wins."""
    if not name:
        raise InvalidUserInputError("lora_name must not be empty", param="lora_name")
    if len(name) > MAX_ADAPTER_NAME:
        raise InvalidUserInputError(
            f"lora_name has {len(name)} characters; at most {MAX_ADAPTER_NAME} are taken", param="lora_name"
        )
    if not name.isprintable() or name != name.strip():
        raise InvalidUserInputError(
            "lora_name must be of printable characters, without spaces at its ends", param="lora_name"
        )


def _success(name: str, what: str) -> Response:
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {what} successfully.")
