"""`/admin/v1/tenants`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from ...tenancy.accounts.principal import limits_of
from ...tenancy.accounts.records import Tenant
from ..body.reader import documented, read_body
from ..serving_state import serving_of
from .admin_schema import Deleted, TenantCreate, TenantList, TenantUpdate, TenantView
from .common import change, query, tenancy_of

router = APIRouter(prefix="/tenants")


@router.post("", status_code=201, openapi_extra=documented(TenantCreate))
async def create_tenant(request: Request) -> TenantView:
    """Add a tenant. A name is never given again, also when its tenant is deleted."""
    body = await read_body(request, TenantCreate, serving_of(request).config.max_body_bytes)
    tenant = Tenant(
        name=body.name,
        weight=body.weight,
        limits=limits_of(body.limits.model_dump()),
        max_adapters=body.max_adapters,
    )
    return TenantView.of(await change(request, lambda store: store.create_tenant(tenant)))


@router.get("")
async def list_tenants(request: Request) -> TenantList:
    """All tenants, by name."""
    tenants = await query(request, tenancy_of(request).store.list_tenants)
    return TenantList(data=[TenantView.of(tenant) for tenant in tenants])


@router.get("/{name}")
async def show_tenant(request: Request, name: str) -> TenantView:
    """One tenant."""
    return TenantView.of(await query(request, tenancy_of(request).store.get_tenant, name))


@router.patch("/{name}", openapi_extra=documented(TenantUpdate))
async def update_tenant(request: Request, name: str) -> TenantView:
    """Change some of a tenant's fields. Requests that run keep what they were admitted with."""
    body = await read_body(request, TenantUpdate, serving_of(request).config.max_body_bytes)
    changes = body.model_dump(exclude_unset=True)
    return TenantView.of(await change(request, lambda store: store.update_tenant(name, changes)))


@router.delete("/{name}")
async def delete_tenant(request: Request, name: str) -> Deleted:
    """Revoke a tenant's keys and forget its adapters. Its usage stays in the ledger; requests that run finish."""
    await change(request, lambda store: store.delete_tenant(name))
    return Deleted(name=name)
