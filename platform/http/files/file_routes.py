"""`/v1/files`: upload, list, show, download and delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...core.errors import InvalidRequestError, invalid
from ...core.text import shorten
from ..batches.service import Batches
from ..protect.accounting import charge_call
from ..protect.error_responses import BodyTooLargeError, ClientDisconnectedError
from ..protect.hardening import check_origin
from ..serving_state import batches_of, principal_of, serving_of
from .form import MAX_OVERHEAD, Form, parse_boundary
from .pages import page
from .store import FileRecord, Upload

router = APIRouter()

PURPOSES = ("batch",)
"""Purposes of uploads; there is no other use for a file here."""
MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000
"""Bounds of `expires_after`, in seconds, as in OpenAI's API."""
_PIECE = 256 << 10
"""Bytes of a download that are read in one go."""
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY, "maximum": MAX_EXPIRY},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", response_model=None, openapi_extra=_FORM)
async def upload_file(request: Request) -> Response:
    """Store a file, which goes to disk while it arrives."""
    batches, tenant = batches_of(request), principal_of(request).tenant
    check_origin(request, serving_of(request).config.cors_origins)
    boundary = parse_boundary(request.headers.get("content-type", ""))
    most = batches.files.quotas.max_file_bytes
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most + MAX_OVERHEAD:
        raise BodyTooLargeError(f"file: it is longer than {most} bytes (max_file_bytes)", param="file")
    await charge_call(request)
    upload = await batches.call(batches.files.upload, tenant)
    try:
        record = await _receive(request, batches, upload, boundary)
    finally:
        batches.threads.submit(upload.close)  # also when the client has gone: no caller waits for it then
    return JSONResponse(record.to_json())


async def _receive(request: Request, batches: Batches, upload: Upload, boundary: bytes) -> FileRecord:
    form, others = Form(boundary, upload.write), 0
    try:
        async for chunk in request.stream():
            if chunk:
                before = upload.num_bytes
                await batches.call(form.feed, chunk)
                others += len(chunk) - (upload.num_bytes - before)
                if others > MAX_OVERHEAD:
                    raise InvalidRequestError(f"The form has more than {MAX_OVERHEAD} bytes in addition to its file")
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    filename = form.finish()
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise InvalidRequestError("Missing field: 'purpose'", param="purpose")
    if purpose not in PURPOSES:
        raise invalid("purpose", f"must be one of {', '.join(PURPOSES)}; got {shorten(purpose)!r}")
    return await batches.call(upload.finish, filename, purpose, _expires_after(form.fields))


def _expires_after(fields: dict[str, str]) -> int | None:
    """Seconds that the file is to be kept; None: not said.

    Raises:
        InvalidRequestError: another anchor than OpenAI's, or out of bounds.
    """
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after.anchor", "must be 'created_at'")
    text = seconds or ""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and MIN_EXPIRY <= int(text) <= MAX_EXPIRY):
        raise invalid("expires_after.seconds", f"must be a whole number from {MIN_EXPIRY} to {MAX_EXPIRY}")
    return int(text)


@router.get("/v1/files", response_model=None)
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    purpose: str | None = None,
) -> Response:
    """The tenant's files, in pages."""
    batches = batches_of(request)

    def made() -> dict[str, Any]:
        records = batches.files.list_files(principal_of(request).tenant)
        shown = [record.to_json() for record in records if purpose in (None, record.purpose)]
        return page(shown if order == "desc" else shown[::-1], after, limit)

    return JSONResponse(await batches.call(made))


@router.get("/v1/files/{file_id}", response_model=None)
async def retrieve_file(request: Request, file_id: str) -> Response:
    """A file's facts."""
    batches = batches_of(request)
    record = await batches.call(batches.files.get, principal_of(request).tenant, file_id)
    return JSONResponse(record.to_json())


@router.get("/v1/files/{file_id}/content", response_model=None)
async def download_file(request: Request, file_id: str) -> Response:
    """A file's content."""
    batches, tenant = batches_of(request), principal_of(request).tenant
    record, content = await batches.call(batches.files.open, tenant, file_id)

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while piece := await batches.call(content.read, _PIECE):
                yield piece
        finally:
            batches.threads.submit(content.close)

    headers = {
        "content-length": str(record.bytes),
        "content-disposition": f"attachment; filename*=utf-8''{quote(record.filename, safe='')}",
    }
    return StreamingResponse(pieces(), headers=headers, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that no running batch reads."""
    batches = batches_of(request)
    await batches.call(batches.delete_file, principal_of(request).tenant, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})
