"""Routes of `/admin/v1` on a server without a database: each answers that there are no tenants."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from ...core.errors import NotFoundError
from ..serving_state import require_admin

router = APIRouter(prefix="/admin/v1", dependencies=[Depends(require_admin)], include_in_schema=False)


@router.api_route("/{path:path}", methods=["GET", "POST", "PATCH", "DELETE"])
async def no_tenants() -> None:
    """Answer that the server runs without tenants."""
    raise NotFoundError("This server runs without tenants: start it with --database")
