"""`/admin/v1/tenants`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from ...tenancy.accounts.principal import merge_limits
from ...tenancy.accounts.records import Tenant
from ..body.reader import documented, read_body
from .admin_schema import Deleted, ListOf, TenantCreate, TenantUpdate, TenantView
from .common import change, query, tenancy_of

router = APIRouter(prefix="/tenants")


@router.post("", status_code=201, response_model=TenantView, openapi_extra=documented(TenantCreate))
async def create_tenant(request: Request) -> Tenant:
    """Add a tenant. A name is never given again, also when its tenant is deleted."""
    body = await read_body(request, TenantCreate)
    tenant = Tenant(
        name=body.name,
        weight=body.weight,
        limits=merge_limits(body.limits.model_dump()),
        max_adapters=body.max_adapters,
    )
    return await change(request, lambda store: store.create_tenant(tenant))


@router.get("", response_model=ListOf[TenantView])
async def list_tenants(request: Request) -> dict[str, list[Tenant]]:
    """All tenants, by name."""
    return {"data": await query(request, tenancy_of(request).store.list_tenants)}


@router.get("/{name}", response_model=TenantView)
async def show_tenant(request: Request, name: str) -> Tenant:
    """One tenant."""
    return await query(request, tenancy_of(request).store.get_tenant, name)


@router.patch("/{name}", response_model=TenantView, openapi_extra=documented(TenantUpdate))
async def update_tenant(request: Request, name: str) -> Tenant:
    """Change some of a tenant's fields. Requests that run keep what they were admitted with."""
    body = await read_body(request, TenantUpdate)
    changes = body.model_dump(exclude_unset=True)
    return await change(request, lambda store: store.update_tenant(name, changes))


@router.delete("/{name}")
async def delete_tenant(request: Request, name: str) -> Deleted:
    """Revoke a tenant's keys and forget its adapters. Its usage stays in the ledger; requests that run finish."""
    await change(request, lambda store: store.delete_tenant(name))
    return Deleted(name=name)
