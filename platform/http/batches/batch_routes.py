"""`/v1/batches`: create, show, list and cancel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...core.errors import invalid
from ...core.text import shorten
from ..body.lenient import LenientModel
from ..body.reader import documented, read_body
from ..files.file_routes import MAX_EXPIRY, MIN_EXPIRY
from ..files.pages import page
from ..files.store import DEFAULT_EXPIRY, new_file_id
from ..openai.responses.protocol import check_metadata
from ..protect.accounting import charge_call
from ..protect.hardening import check_origin
from ..serving_state import batches_of, principal_of, serving_of
from .lines import URLS
from .store import WINDOW_SECONDS, BatchRecord, new_batch_id

router = APIRouter()

PATH = "/v1/batches"


class OutputExpiresAfter(LenientModel):
    """`output_expires_after`: how long the files of answers and errors are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY, le=MAX_EXPIRY)]


class BatchRequest(LenientModel):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None

    def check(self) -> None:
        """Refuse values that are not served.

        Raises:
            InvalidRequestError: `param` names the field.
        """
        if self.endpoint not in URLS:
            raise invalid("endpoint", f"must be one of {', '.join(URLS)}; got {shorten(self.endpoint)!r}")
        if self.completion_window not in WINDOW_SECONDS:
            windows = ", ".join(WINDOW_SECONDS)
            raise invalid("completion_window", f"must be {windows}; got {shorten(self.completion_window)!r}")
        check_metadata(self.metadata)


@router.post(PATH, response_model=None, openapi_extra=documented(BatchRequest))
async def create_batch(request: Request) -> Response:
    """Have the requests of a file answered."""
    batches, principal = batches_of(request), principal_of(request)
    body = await read_body(request, BatchRequest)
    body.check()
    serving_of(request).check_ready()
    await charge_call(request)
    now, expires = int(batches.files.clock()), body.output_expires_after
    record = BatchRecord(
        id=new_batch_id(),
        tenant=principal.tenant,
        key_id=principal.key_id,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + WINDOW_SECONDS[body.completion_window],
        reserved_output_id=new_file_id(),
        reserved_error_id=new_file_id(),
        output_expires_after=DEFAULT_EXPIRY if expires is None else expires.seconds,
        metadata=body.metadata,
    )
    await batches.create(record)
    return JSONResponse(record.to_json())


@router.get(PATH, response_model=None)
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> Response:
    """The tenant's batches, the newest first, in pages."""
    batches = batches_of(request)

    def made() -> dict[str, Any]:
        records = batches.store.list_batches(principal_of(request).tenant)
        return page([record.to_json() for record in records], after, limit)

    return JSONResponse(await batches.call(made))


@router.get(PATH + "/{batch_id}", response_model=None)
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """A batch."""
    batches = batches_of(request)
    record = await batches.call(batches.store.get, principal_of(request).tenant, batch_id)
    return JSONResponse(record.to_json())


@router.post(PATH + "/{batch_id}/cancel", response_model=None)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch; the answers that it has are kept."""
    batches = batches_of(request)
    check_origin(request, serving_of(request).config.cors_origins)
    return JSONResponse((await batches.cancel(principal_of(request).tenant, batch_id)).to_json())
