"""Routes that load, unload and pin adapters: any adapter for admins, a tenant's own for the tenant."""

from __future__ import annotations

import contextlib
import json

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...client.adapters.sources.memory import Upload
from ...core.adapter_names import engine_name
from ...core.errors import AdapterError, InvalidUserInputError, NotFoundError, OutriderError, PermissionDeniedError
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from ...core.text import shorten
from ...tenancy.accounts.principal import Principal
from ...tenancy.accounts.records import StoredAdapter
from ..body.reader import documented, read_body
from ..observe.request_log import ADAPTER_DIGEST
from ..protect.accounting import charge_call
from ..protect.audit_log import audit
from ..serving_state import Serving, principal_of, require_admin, serving_of
from .adapter_bodies import LoadAdapterRequest, PinAdapterRequest, UnloadAdapterRequest, UploadAdapterRequest
from .adapter_choice import MAX_ADAPTER_NAME
from .adapter_upload import about_upload, documented_load, is_form, receive_form, receive_shared_memory, uploaded
from .model_registry import unknown_adapter

router = APIRouter()


@router.post("/v1/load_lora_adapter", response_model=None, openapi_extra=documented_load())
async def load_adapter(request: Request) -> Response:
    """Register an adapter from a folder or another allowed source, or one that arrives with the call."""
    principal = await _may_have_adapters(request)
    serving = serving_of(request)
    serving.check_ready()  # before gigabytes arrive
    memory = serving.llm.sources.memory
    upload: Upload | None = None
    with contextlib.ExitStack() as stack:
        body: LoadAdapterRequest | UploadAdapterRequest
        if is_form(request):
            upload = stack.enter_context(memory.upload("" if principal.is_admin else principal.tenant))
            body = await receive_form(request, upload, memory.max_adapter_bytes)
        else:
            body = await read_body(request, LoadAdapterRequest)
            body.check_source()
        _check_new_name(body.lora_name)
        if body.pinned and not principal.is_admin:
            message = "pinned: an adapter is kept on the device by an admin's API key"
            raise PermissionDeniedError(message, param="pinned")
        tenant = _owner(serving, principal, body.tenant)
        _check_allowed(serving, principal, body.lora_name)
        serving.models.check_free(body.lora_name, tenant=tenant, load_inplace=body.load_inplace)
        if isinstance(body, LoadAdapterRequest) and body.lora_shm is not None:
            _check_shared_memory(serving, principal)
            upload = stack.enter_context(memory.upload(tenant))
            await receive_shared_memory(body, upload, memory.max_adapter_bytes)
        async with serving.adapter_locks.of(engine_name(tenant, body.lora_name)):
            if not principal.is_admin:
                stack.enter_context(serving.models.room_for(body.lora_name, tenant, principal.max_adapters))
            if upload is not None:
                info = await _load_upload(serving, body, upload, tenant)
            else:
                assert isinstance(body, LoadAdapterRequest)
                info = await _load_path(serving, body, tenant, None if principal.is_admin else principal.max_adapters)
    await _audit(request, "loaded", tenant, body.lora_name)
    response = _success(body.lora_name, "added")
    response.headers[ADAPTER_DIGEST] = info.digest
    return response


async def _load_path(serving: Serving, body: LoadAdapterRequest, tenant: str, max_adapters: int | None) -> AdapterInfo:
    """Load and store an adapter. `max_adapters` is None if an admin loads, who reads from other folders than a
    tenant does."""
    models, policy = serving.models, serving.adapter_policy
    admitted = await policy.admit(body, tenant=None if max_adapters is None else tenant)
    info = await models.load(
        admitted.request,
        tenant=tenant,
        load_inplace=body.load_inplace,
        pinned=body.pinned,
        running=body.running,
        root=body.lora_path,
    )
    try:
        stored = None if serving.adapter_sync is None else await _stored(serving, admitted.request, tenant, body.pinned)
        await policy.check_again(admitted)
        if serving.adapter_sync is not None and stored is not None:
            await serving.adapter_sync.remember(stored, max_adapters)
    except AdapterError:  # unknown what has been read
        with contextlib.suppress(OutriderError):
            await models.unload(body.lora_name, "abort", tenant=tenant)
            if serving.adapter_sync is not None:
                await serving.adapter_sync.forget(tenant, body.lora_name)
        raise
    except OutriderError:
        if not body.load_inplace:  # else its requests continue, and the next load stores it
            with contextlib.suppress(OutriderError):
                await models.unload(body.lora_name, tenant=tenant)
        raise
    return info


async def _load_upload(
    serving: Serving, body: LoadAdapterRequest | UploadAdapterRequest, upload: Upload, tenant: str
) -> AdapterInfo:
    """Load an adapter that has arrived. Other servers of a database do not get it."""
    if serving.adapter_sync is not None and serving.adapter_sync.has(tenant, body.lora_name):
        raise InvalidUserInputError(
            f"lora_name: {shorten(body.lora_name)!r} is an adapter of the database, which all its servers have; unload "
            "it before another one is loaded from memory",
            param="lora_name",
        )
    config = body.config if isinstance(body.config, str) else json.dumps(body.config)
    request = await uploaded(upload, body.lora_name, config.encode(), body.sha256, tenant)
    try:
        return await serving.models.load(
            request, tenant=tenant, load_inplace=body.load_inplace, pinned=body.pinned, running=body.running
        )
    except AdapterError as error:
        raise about_upload(error) from error


def _check_shared_memory(serving: Serving, principal: Principal) -> None:
    """Check that shared memory may be read: it may hold anybody's data.

    Raises:
        PermissionDeniedError: a tenant asks. AdapterError: the server does not allow it.
    """
    if not principal.is_admin:
        raise PermissionDeniedError("lora_shm: shared memory is read for an admin's API key alone", param="lora_shm")
    serving.adapter_policy.check_shared_memory()


async def _stored(serving: Serving, request: LoRARequest, tenant: str, pinned: bool) -> StoredAdapter:
    local = serving.models.adapter(engine_name(tenant, request.name))
    digest = None if local is None else await serving.llm.sources.digest(local.folder)
    return StoredAdapter(
        tenant=tenant,
        name=request.name,
        path=request.path,
        draft_path=request.draft_path,
        pinned=pinned,
        digest=digest,
    )


@router.post("/v1/unload_lora_adapter", response_model=None, openapi_extra=documented(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter."""
    principal = await _may_have_adapters(request)
    serving = serving_of(request)
    body = await read_body(request, UnloadAdapterRequest)
    tenant = _owner(serving, principal, body.tenant)
    serving.check_ready()
    if not serving.models.seen_by(principal).allows(body.lora_name):
        raise unknown_adapter(body.lora_name)
    async with serving.adapter_locks.of(engine_name(tenant, body.lora_name)):
        remembered = serving.adapter_sync is not None and await serving.adapter_sync.forget(tenant, body.lora_name)
        try:
            await serving.models.unload(body.lora_name, body.mode, tenant=tenant)
        except NotFoundError:
            if not remembered:  # else it could not be loaded when the server started, and now it is gone for good
                raise
    await _audit(request, "unloaded", tenant, body.lora_name)
    return _success(body.lora_name, "removed")


@router.post("/v1/pin_lora_adapter", response_model=None, openapi_extra=documented(PinAdapterRequest))
async def pin_adapter(request: Request) -> Response:
    """Keep an adapter on the device."""
    return _success(await _set_pinned(request, True), "pinned")


@router.post("/v1/unpin_lora_adapter", response_model=None, openapi_extra=documented(PinAdapterRequest))
async def unpin_adapter(request: Request) -> Response:
    """Let an adapter be evicted when others need its memory."""
    return _success(await _set_pinned(request, False), "unpinned")


async def _set_pinned(request: Request, pinned: bool) -> str:
    require_admin(request)
    await charge_call(request)
    serving = serving_of(request)
    body = await read_body(request, PinAdapterRequest)
    tenant = _owner(serving, principal_of(request), body.tenant)
    serving.check_ready()
    async with serving.adapter_locks.of(engine_name(tenant, body.lora_name)):
        await serving.models.set_pinned(body.lora_name, pinned, tenant=tenant)
        if serving.adapter_sync is not None:
            await serving.adapter_sync.pin(tenant, body.lora_name, pinned)
    await _audit(request, "pinned" if pinned else "unpinned", tenant, body.lora_name)
    return body.lora_name


async def _may_have_adapters(request: Request) -> Principal:
    """Check that the client may load and unload: admins, and tenants that may have adapters of their own. The call
    counts against their limits, before anything is done for it.

    Raises:
        PermissionDeniedError: the client may not.
        RateLimitError: there are no more requests this minute.
    """
    principal = principal_of(request)
    if not (principal.tenant and principal.max_adapters):
        require_admin(request)
    await charge_call(request)
    return principal


def _owner(serving: Serving, principal: Principal, tenant: str | None) -> str:
    """Owner of the adapter that a call is about: the tenant itself, or what an admin says ("" for shared ones).

    Raises:
        PermissionDeniedError: a tenant names another one, whether or not there is one of that name.
        NotFoundError: an admin names one that does not exist.
    """
    if not principal.is_admin:
        if tenant not in (None, principal.tenant):
            raise PermissionDeniedError("tenant: only an admin's API key may name another tenant", param="tenant")
        return principal.tenant
    if tenant and not serving.has_tenant(tenant):
        raise NotFoundError(f"The tenant {shorten(tenant)!r} does not exist", param="tenant")
    return tenant or ""


async def _audit(request: Request, what: str, tenant: str, name: str) -> None:
    await audit(request, f"{what} adapter {shorten(f'{tenant}/{name}' if tenant else name)!r}")


def _check_allowed(serving: Serving, principal: Principal, name: str) -> None:
    if not serving.models.seen_by(principal).allows(name):
        raise PermissionDeniedError("lora_name: this API key may not have an adapter of that name", param="lora_name")


def _check_new_name(name: str) -> None:
    """Check that people can read and send a new name. It may look like a weighted sum ("a:0.7+b:0.3"): a whole name
    always wins."""
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
