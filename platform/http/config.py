"""Options of the HTTP server; those of the engine are in `platform.core.config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..client.adapter_sources import SourceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the server needs to know beside the engine's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose one."""
    api_keys: tuple[str, ...] = ()
    """None given: everything is open."""
    admin_api_keys: tuple[str, ...] = ()
    """Keys that alone may load, unload and pin adapters; each is also an API key. None given: every client may."""
    served_model_names: tuple[str, ...] = ("outrider-demo",)
    """Names that select the base model; the first one is shown in answers to requests that name none."""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """Adapters to register at the start: name -> folder, or another source."""
    lora_draft_paths: Mapping[str, str] = field(default_factory=dict)
    """Folders of their draft weights, for those whose folder was named."""
    lora_sources: SourceOptions = field(default_factory=SourceOptions)
    """Where adapters may come from."""
    lora_roots: tuple[str, ...] = ()
    """Folders from which adapters may be loaded over HTTP, beside those of `lora_sources` and around `lora_modules`."""
    lora_remote: tuple[str, ...] = ()
    """Schemes of other sources from which that is allowed: "hf", "s3", ..."""
    chat_template: str | None = None
    """Takes the place of the tokenizer's own."""
    trust_request_chat_template: bool = False
    """Take `chat_template` from requests. A template is a program: one with nested loops can stall the server."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    max_body_bytes: int = 32 << 20
    """A longer request body is answered with 413."""
    log_level: str = "warning"
    access_log: bool = False
