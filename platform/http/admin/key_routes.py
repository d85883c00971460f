"""`/admin/v1/keys`."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ...tenancy.accounts.principal import merge_limits
from ...tenancy.accounts.records import Key
from ..body.reader import documented, read_body
from .admin_schema import KeyCreate, KeyUpdate, KeyView, ListOf, NewKeyView
from .common import change, query, tenancy_of

router = APIRouter(prefix="/keys")


@router.post("", status_code=201, response_model=NewKeyView, openapi_extra=documented(KeyCreate))
async def create_key(request: Request, response: Response) -> dict[str, Any]:
    """Make a key. This answer alone holds it."""
    body = await read_body(request, KeyCreate)
    limits = merge_limits(body.limits.model_dump())
    key, secret = await change(
        request,
        lambda store: store.create_key(
            body.tenant, name=body.name, scopes=body.scopes, limits=limits, expires_at=body.expires_at
        ),
    )
    response.headers["Cache-Control"] = "no-store"
    return _fields(key) | {"key": secret}


@router.get("", response_model=ListOf[KeyView])
async def list_keys(
    request: Request,
    tenant: Annotated[str | None, Query(description="Only its keys")] = None,
    revoked: Annotated[bool, Query(description="Those that have been revoked, too")] = False,
) -> dict[str, Any]:
    """Keys, oldest first."""
    keys = await query(request, tenancy_of(request).store.list_keys, tenant, revoked=revoked)
    return {"data": [_fields(key) for key in keys]}


@router.get("/{key_id}", response_model=KeyView)
async def show_key(request: Request, key_id: str) -> dict[str, Any]:
    """One key, also when it has been revoked."""
    return _fields(await query(request, tenancy_of(request).store.get_key, key_id))


@router.patch("/{key_id}", response_model=KeyView, openapi_extra=documented(KeyUpdate))
async def update_key(request: Request, key_id: str) -> dict[str, Any]:
    """Change some of a key's fields."""
    body = await read_body(request, KeyUpdate)
    changes = body.model_dump(exclude_unset=True)
    return _fields(await change(request, lambda store: store.update_key(key_id, changes)))


@router.delete("/{key_id}", response_model=KeyView)
async def revoke_key(request: Request, key_id: str) -> dict[str, Any]:
    """Revoke a key: at once on this server, within a second on others. Requests that it has begun finish."""
    return _fields(await change(request, lambda store: store.revoke_key(key_id)))


def _fields(key: Key) -> dict[str, Any]:
    return dataclasses.asdict(key) | {"state": key.state(time.time())}
