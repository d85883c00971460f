"""Adapters that arrive with the call that loads them: in a form, or in a shared memory object.

The bytes go from the connection to a file in memory (`client.adapters.sources.memory`), which the engine's reader opens
like that of a folder: all checks of adapters are the reader's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from ...client.adapters.sources.memory import MAX_CONFIG_BYTES, Upload, check_sha256
from ...client.adapters.sources.shared_memory import read_shared_memory
from ...core.adapter_files import CONFIG_FILE
from ...core.errors import AdapterError, InvalidRequestError
from ...core.lora_request import LoRARequest
from ..body.reader import describe, documented
from ..files.form import MAX_OVERHEAD, Form, parse_boundary
from ..protect.error_responses import BodyTooLargeError, ClientDisconnectedError
from ..protect.hardening import check_origin
from ..serving_state import serving_of
from .adapter_bodies import LoadAdapterRequest, UploadAdapterRequest

_FORM = "multipart/form-data"
_PIECE = 1 << 20
"""Bytes of a form that are parsed in one go, in a thread: some milliseconds."""


def documented_load() -> dict[str, Any]:
    """The OpenAPI description of the route that loads: JSON, or a form."""
    described = documented(LoadAdapterRequest)
    form = documented(UploadAdapterRequest)["requestBody"]["content"]["application/json"]["schema"]
    form["properties"]["file"] = {"type": "string", "format": "binary", "description": "adapter_model.safetensors"}
    form["required"] = [*form["required"], "file"]
    described["requestBody"]["content"][_FORM] = {"schema": form}
    return described


def is_form(request: Request) -> bool:
    """True for a body that is a form."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == _FORM


async def receive_form(request: Request, upload: Upload, max_bytes: int) -> UploadAdapterRequest:
    """Receive a form, whose file of at most `max_bytes` goes to `upload`.

    Raises:
        BodyTooLargeError: its length says that it is too large. PermissionDeniedError: another site's page sends it.
        InvalidRequestError: it is no form, is cut, or a field is missing, unknown or wrong; `param` names it.
        AdapterError, InvalidUserInputError: the file is too large, or there is no room for it.
    """
    check_origin(request, serving_of(request).config.cors_origins)
    most_others = MAX_OVERHEAD + MAX_CONFIG_BYTES
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit():
        if int(length) > max_bytes + most_others:
            raise BodyTooLargeError(f"file: it is larger than {max_bytes} bytes (--max-lora-bytes)", param="file")
        upload.expect(int(length))
    form = Form(parse_boundary(request.headers.get("content-type", "")), upload.write, {"config": MAX_CONFIG_BYTES})
    pieces: list[bytes] = []
    size = total = 0

    async def feed() -> None:
        await asyncio.to_thread(form.feed, b"".join(pieces))
        pieces.clear()
        if total - upload.num_bytes > most_others:
            raise InvalidRequestError(f"The form has more than {most_others} bytes in addition to its file")

    try:
        async for chunk in request.stream():
            pieces.append(chunk)
            size, total = size + len(chunk), total + len(chunk)
            if size >= _PIECE:
                await feed()
                size = 0
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    await feed()
    form.finish()
    try:
        return UploadAdapterRequest.model_validate(form.fields, strict=False)
    except ValidationError as error:
        raise describe(error) from None


async def receive_shared_memory(body: LoadAdapterRequest, upload: Upload, max_bytes: int) -> None:
    """Copy the shared memory object that a load names.

    Raises:
        AdapterError: it cannot be read, is too large, or changes meanwhile. InvalidUserInputError: there is no room.
    """
    assert body.lora_shm is not None
    if body.sha256 is not None:
        check_sha256(body.sha256)  # before a gigabyte is read
    await asyncio.to_thread(read_shared_memory, body.lora_shm, upload.expect, upload.write, max_bytes)


async def uploaded(upload: Upload, name: str, config: bytes, sha256: str | None, tenant: str) -> LoRARequest:
    """The adapter that has arrived, with its plain name.

    Raises:
        AdapterError: another content than `sha256`. InvalidUserInputError: the tenant has no room for it.
    """
    request = await asyncio.to_thread(upload.finish, config, sha256, tenant)
    return LoRARequest(name, path=request.path, roots=request.roots, files=request.files)


def about_upload(error: AdapterError) -> AdapterError:
    """The error of an adapter that has no path, about what has arrived."""
    if error.param != "lora_path":
        return error
    return AdapterError(error.message, param="config" if error.message.startswith(CONFIG_FILE) else "file")
