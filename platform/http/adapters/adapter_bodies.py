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
    """Owner of the adapter, given by admins; without one all share it. A tenant's own key implies the tenant."""
    base_model_name: str | None = None
    """Ignored: written by clients that manage vLLM's adapters; there is one base model here."""
    lora_int_id: int | None = None
    """Ignored: written by vLLM's clients; adapters go by their name here."""


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
