"""Options of the HTTP server; those of the engine are in `platform.core.config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..client.adapters.sources import SourceOptions
from ..core.logs import LogFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose one."""
    api_keys: tuple[str, ...] = ()
    """None given: everything is open."""
    admin_api_keys: tuple[str, ...] = ()
    """Keys that alone may load, unload and pin adapters; each is also an API key. None given: every client may."""
    database: str | None = field(default=None, repr=False)  # there may be a password in it
    """Address of the database of tenants and keys; None: there are no tenants."""
    journal: str | None = None
    """Folder of the ledger's journal; None: next to a SQLite database, else among the user's state."""
    journal_max_bytes: int = 64 << 20
    """Disk that it may take while the database is away; when that is full, new requests are refused."""
    shared_limits: bool = False
    """Limits hold for all servers of the database that have this option, not for each of them."""
    served_model_names: tuple[str, ...] = ("outrider-demo",)
    """Names that select the base model; the first one is shown in answers to requests that name none."""
    model_aliases: tuple[str, ...] = ()
    """Further names that select the base model, such as the path that the server was started with."""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """Adapters to register at the start: name -> folder, or another source."""
    lora_draft_paths: Mapping[str, str] = field(default_factory=dict)
    """Draft weights of `lora_modules`: name -> folder, if one was given."""
    lora_sources: SourceOptions = field(default_factory=SourceOptions)
    """Options of the sources that adapters come from."""
    lora_roots: tuple[str, ...] = ()
    """Folders that adapters may be loaded from over HTTP, besides those of `lora_sources` and around `lora_modules`."""
    lora_remote: tuple[str, ...] = ()
    """Schemes of other sources from which that is allowed: "hf", "s3", ..."""
    chat_template: str | None = None
    """Takes the place of the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of chat templates that requests leave out."""
    tool_call_parser: str | None = None
    """Format of calls in answers (`platform/http/openai/tools/formats.py`); None: the tokenizer's, or a guess from the
    chat template."""
    reasoning_parser: str | None = None
    """Format of reasoning in answers without tools; None: reasoning stays in the content."""
    trust_request_chat_template: bool = False
    """Take `chat_template` from requests. A template is a program: one with nested loops can stall the server."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    engine_hang_timeout: float = 120.0
    """Seconds without a sign of life after which the engine counts as dead; 0: never. Longer than any step takes."""
    max_connections: int = 2048
    """One above it is answered with 503, save for probes of health."""
    client_timeout: float = 60.0
    """Seconds that a client gets to send its request, or to take something of its answer."""
    max_body_bytes: int = 8 << 20
    """A longer request body is answered with 413."""
    batch_dir: str | None = None
    """Folder of the clients' files and batches; None: `/v1/files` and `/v1/batches` are off."""
    batch_concurrency: int | None = None
    """Requests of batches that run at once; None: half of the engine's sequences."""
    max_file_bytes: int = 200 << 20
    """A longer uploaded file is answered with 413."""
    max_tenant_bytes: int = 2 << 30
    """Bytes that a tenant's files and batches take together."""
    max_tenant_files: int = 1000
    max_tenant_batches: int = 16
    """Batches of a tenant that have not ended."""
    strict_fields: bool = False
    """Refuse fields of requests that are not known, or do nothing; else they are ignored, and named in a header."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the API; "*" means all. None given: those of its own alone."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Options that were given and change nothing, with the reason: logged at the start."""
    log_level: str = "warning"
    uvicorn_log_level: str | None = None
    """Log level of the web server alone; None: `log_level`."""
    log_format: LogFormat = "text"
    log_requests: bool = False
    """One line for each request, without its text."""
    log_prompts: bool = False
    """Write prompts and answers into the requests' lines."""
    access_log: bool = False
    metrics_prefix: str = "outrider"
    """"vllm": metrics have vLLM's names in addition to their own."""
    open_metrics: bool = False
    """Show /metrics to everybody even if there are tenants, whose names are in it."""
    otlp_endpoint: str | None = None
    """Collector of traces; None: none are made."""
