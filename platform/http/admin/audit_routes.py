"""`/admin/v1/audit`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request

from ...tenancy.database.audit import COLUMNS, MAX_ROWS, list_audit
from .admin_schema import AuditRow, ListOf
from .common import query, tenancy_of
from .usage_routes import CSV, Format, csv_response

router = APIRouter(prefix="/audit")

MAX_ID = (1 << 31) - 1


@router.get("", response_model=ListOf[AuditRow], responses=CSV)
async def show_audit(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100,
    before: Annotated[int | None, Query(ge=1, le=MAX_ID, description="The id of a change: those older than it")] = None,
    format: Format = "json",
) -> Any:
    """Rows of the audit, newest first: changes over HTTP and with `outrider admin`."""
    rows = await query(request, list_audit, tenancy_of(request).database, limit, before)
    if format == "csv":
        return csv_response(COLUMNS, rows)
    return {"data": rows}
