"""Request bodies of the routes that load, unload and pin adapters. Unknown fields are refused."""

from __future__ import annotations

from typing import Any, Literal

from ...core.errors import InvalidRequestError, InvalidUserInputError
from ..body.lenient import RequestModel


class _Load(RequestModel):
    """Fields of every load."""

    lora_name: str
    load_inplace: bool = False
    running: Literal["finish", "abort"] = "finish"
    """Ours: with `load_inplace`, requests on the earlier version finish on it, or end with an error ("abort")."""
    pinned: bool = False
    tenant: str | None = None
    """Owner of the adapter, given by admins; without one all share it. A tenant's own key implies the tenant."""
    base_model_name: str | None = None
    """Ignored: written by clients that manage vLLM's adapters; there is one base model here."""
    lora_int_id: int | None = None
    """Ignored: written by vLLM's clients; adapters go by their name here."""


class LoadAdapterRequest(_Load):
    """`POST /v1/load_lora_adapter`."""

    lora_path: str | None = None
    draft_path: str | None = None
    """Folder of its draft weights; without one they are looked for under `draft/` in `lora_path`."""
    lora_shm: str | None = None
    """Ours, instead of `lora_path`: name of a shared memory object (`/dev/shm`) with the safetensors file."""
    config: dict[str, Any] | None = None
    """Ours: its adapter_config.json, for `lora_shm`."""
    sha256: str | None = None
    """Ours: SHA-256 of the file in `lora_shm`, in hexadecimal; another content is refused."""

    def check_source(self) -> None:
        """Check that one source is given, with its fields; InvalidRequestError names a field."""
        for field in ("lora_path", "draft_path", "lora_shm"):
            if getattr(self, field) == "":
                raise InvalidUserInputError(f"{field} must not be empty", param=field)
        if self.lora_shm is None:
            if self.lora_path is None:
                raise InvalidRequestError("Missing field: 'lora_path'", param="lora_path")
            foreign, reason = ("config", "sha256"), "is for lora_shm; lora_path is a folder, which has its own"
        else:
            if self.config is None:
                raise InvalidRequestError("Missing field: 'config', the adapter_config.json", param="config")
            foreign, reason = ("lora_path", "draft_path"), "and lora_shm exclude each other"
        for field in foreign:
            if getattr(self, field) is not None:
                raise InvalidRequestError(f"{field} {reason}", param=field)


class UploadAdapterRequest(_Load):
    """Fields of the form of `POST /v1/load_lora_adapter`, in addition to `file`."""

    config: str
    """Its adapter_config.json."""
    sha256: str | None = None
    """SHA-256 of `file`, in hexadecimal; another content is refused."""


class PinAdapterRequest(RequestModel):
    """`POST /v1/pin_lora_adapter`, `/v1/unpin_lora_adapter`."""

    lora_name: str
    tenant: str | None = None
    """Owner, as for loading."""


class UnloadAdapterRequest(RequestModel):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None
    """See `LoadAdapterRequest`."""
    mode: Literal["drain", "abort"] = "drain"
    """Ours: requests that use the adapter finish ("drain"), or end with an error ("abort")."""
    tenant: str | None = None
    """Owner, as for loading."""
