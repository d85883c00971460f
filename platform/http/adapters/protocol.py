"""Request bodies of the routes that load, unload and pin adapters. Unknown fields are refused."""

from __future__ import annotations

from typing import Literal

from ..body.lenient import RequestModel


class LoadAdapterRequest(RequestModel):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    draft_path: str | None = None
    """Folder of its draft weights; without one they are looked for under `draft/` in `lora_path`."""
    load_inplace: bool = False
    pinned: bool = False
    tenant: str | None = None
    """Whose adapter it is, for admins to say; without one it is shared by all. A tenant's own key says it by itself."""
    base_model_name: str | None = None
    """Written by clients that manage vLLM's adapters; there is one base model here."""
    lora_int_id: int | None = None
    """Written by vLLM's clients; adapters go by their name here."""


class PinAdapterRequest(RequestModel):
    """`POST /v1/pin_lora_adapter`, `/v1/unpin_lora_adapter`."""

    lora_name: str
    tenant: str | None = None
    """As for loading."""


class UnloadAdapterRequest(RequestModel):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None
    """See `LoadAdapterRequest`."""
    mode: Literal["drain", "abort"] = "drain"
    """Ours: whether requests that have it finish, or end with an error."""
    tenant: str | None = None
    """As for loading."""
