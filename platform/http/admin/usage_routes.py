"""`/admin/v1/usage` and `/admin/v1/audit`: what was used, and who changed what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, create_model
from starlette.requests import Request
from starlette.responses import Response

from ...tenancy.database.audit import COLUMNS, MAX_ROWS, list_audit
from ...tenancy.ledger.csv_table import to_csv
from ...tenancy.ledger.reports import COUNTS, GROUPS, MAX_REQUESTS, UsageFilter, list_requests, parse_groups, sum_usage
from ...tenancy.ledger.usage_row import UsageRow as LedgerRow
from ...tenancy.times import parse_time
from .admin_schema import AuditRow, ListOf, UsageRow
from .common import query, tenancy_of

router = APIRouter()

_FIELDS: dict[str, Any] = {field.name: (field.type, ...) for field in msgspec.structs.fields(LedgerRow)}
RequestRow: type[BaseModel] = create_model("RequestRow", __doc__="A request of the ledger.", **_FIELDS)

CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}
MAX_ID = (1 << 31) - 1
Format = Annotated[Literal["json", "csv"], Query()]


def usage_filter(
    tenant: Annotated[str | None, Query()] = None,
    key: Annotated[str | None, Query(description="A key's id")] = None,
    adapter: Annotated[str | None, Query(description="Empty: the base model")] = None,
    start: Annotated[
        str | None, Query(alias="from", description="Requests that ended then or later: seconds since 1970, or a date")
    ] = None,
    end: Annotated[str | None, Query(alias="to", description="And before this")] = None,
) -> UsageFilter:
    """The filters of a query string."""
    return UsageFilter(
        tenant=tenant,
        key=key,
        adapter=adapter,
        start=None if start is None else parse_time(start, "from"),
        end=None if end is None else parse_time(end, "to"),
    )


Which = Annotated[UsageFilter, Depends(usage_filter)]


@router.get("/usage", response_model=ListOf[UsageRow], response_model_exclude_none=True, responses=CSV)
async def show_usage(
    request: Request,
    which: Which,
    group_by: Annotated[str, Query(description=f"Some of {', '.join(GROUPS)}, with commas between them")] = "tenant",
    format: Format = "json",
) -> Any:
    """Tokens and requests of the ledger, summed up."""
    groups = parse_groups(group_by, "group_by")
    rows = await query(request, sum_usage, tenancy_of(request).database, groups, which)
    if format == "csv":
        return csv_response([*groups, "requests", *COUNTS], rows)
    return {"data": rows}


@router.get("/usage/requests", response_model=ListOf[RequestRow], responses=CSV)  # type: ignore[valid-type]  # made above
async def show_requests(
    request: Request, which: Which, limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS)] = 100, format: Format = "json"
) -> Any:
    """The ledger's last requests, newest first. Requests that still run are not in it."""
    rows = await query(request, list_requests, tenancy_of(request).database, which, limit)
    if format == "csv":
        return csv_response(tuple(_FIELDS), rows)
    return {"data": rows}


@router.get("/audit", response_model=ListOf[AuditRow], responses=CSV)
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


def csv_response(columns: Sequence[str], rows: Sequence[Any]) -> Response:
    """A table."""
    return Response(to_csv(columns, rows), media_type="text/csv; charset=utf-8")
