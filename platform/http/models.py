"""`/v1/models`, and loading and unloading adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..core.errors import InvalidUserInputError
from ..core.lora_request import LoRARequest
from .body import documented, read_body
from .protocol import LoadAdapterRequest, UnloadAdapterRequest
from .serving import serving_of

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
    await models.refresh()
    return JSONResponse(models.card(model))


@router.post("/v1/load_lora_adapter", response_model=None, openapi_extra=documented(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Register an adapter from a folder that the server can read."""
    serving = serving_of(request)
    body = await read_body(request, LoadAdapterRequest, serving.config.max_body_bytes)
    for name in ("lora_name", "lora_path"):
        if not getattr(body, name):
            raise InvalidUserInputError(f"{name} must not be empty", param=name)
    if len(body.lora_name) > MAX_ADAPTER_NAME:
        raise InvalidUserInputError(
            f"lora_name has {len(body.lora_name)} characters; at most {MAX_ADAPTER_NAME} are taken", param="lora_name"
        )
    serving.check_ready()
    adapter = LoRARequest(body.lora_name, path=body.lora_path, draft_path=body.draft_path)
    await serving.models.load(adapter, load_inplace=body.load_inplace, pinned=body.pinned)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None, openapi_extra=documented(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Take an adapter away."""
    serving = serving_of(request)
    body = await read_body(request, UnloadAdapterRequest, serving.config.max_body_bytes)
    serving.check_ready()
    await serving.models.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
