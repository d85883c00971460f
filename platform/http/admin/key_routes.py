"""`/admin/v1/keys`."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ...tenancy.accounts.principal import limits_of
from ...tenancy.accounts.records import Key
from ..body.reader import documented, read_body
from ..serving_state import serving_of
from .admin_schema import KeyCreate, KeyList, KeyUpdate, KeyView, NewKeyView
from .common import change, query, tenancy_of

router = APIRouter(prefix="/keys")


@router.post("", status_code=201, openapi_extra=documented(KeyCreate))
async def create_key(request: Request, response: Response) -> NewKeyView:
    """Make a key. This answer alone holds it."""
    body = await read_body(request, KeyCreate, serving_of(request).config.max_body_bytes)
    limits = limits_of(body.limits.model_dump())
    key, secret = await change(
        request,
        lambda store: store.create_key(
            body.tenant, name=body.name, scopes=body.scopes, limits=limits, expires_at=body.expires_at
        ),
    )
    response.headers["Cache-Control"] = "no-store"
    return NewKeyView(key=secret, **NewKeyView.fields_of(key, time.time()))


@router.get("")
async def list_keys(
    request: Request,
    tenant: Annotated[str | None, Query(description="Only its keys")] = None,
    revoked: Annotated[bool, Query(description="Those that have been revoked, too")] = False,
) -> KeyList:
    """Keys, oldest first."""
    keys = await query(request, tenancy_of(request).store.list_keys, tenant, revoked=revoked)
    return KeyList(data=[_view(key) for key in keys])


@router.get("/{key_id}")
async def show_key(request: Request, key_id: str) -> KeyView:
    """One key, also when it has been revoked."""
    return _view(await query(request, tenancy_of(request).store.get_key, key_id))


@router.patch("/{key_id}", openapi_extra=documented(KeyUpdate))
async def update_key(request: Request, key_id: str) -> KeyView:
    """Change some of a key's fields."""
    body = await read_body(request, KeyUpdate, serving_of(request).config.max_body_bytes)
    changes = body.model_dump(exclude_unset=True)
    return _view(await change(request, lambda store: store.update_key(key_id, changes)))


@router.delete("/{key_id}")
async def revoke_key(request: Request, key_id: str) -> KeyView:
    """Revoke a key: at once on this server, within a second on others. Requests that it has begun finish."""
    return _view(await change(request, lambda store: store.revoke_key(key_id)))


def _view(key: Key) -> KeyView:
    return KeyView(**KeyView.fields_of(key, time.time()))
