"""`/admin/v1`: tenants, keys, usage, audit and shared prefixes, for keys with the scope "admin"; needs a database."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from ..serving_state import require_admin
from . import key_routes, prefix_routes, tenant_routes, usage_routes
from .common import ERRORS

# Whether the caller may come here is found out before anything of the request is looked at.
router = APIRouter(
    prefix="/admin/v1",
    tags=["admin"],
    dependencies=[Depends(require_admin)],
    responses=ERRORS,
)
for module in (tenant_routes, key_routes, usage_routes, prefix_routes):
    router.include_router(module.router)
