"""Options of the HTTP server; those of the engine are in `platform.core.config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..client.adapters.sources import SourceOptions
from ..core.logs import FORMATS, LogFormat
from ..core.option import option
from ..core.sizes import parse_bytes
from .openai.tools.formats import FORMATS as TOOL_FORMATS
from .openai.tools.formats import REASONING_FORMATS

_server = partial(option, group="Server")
_tenants = partial(option, group="Tenants")
_robustness = partial(option, group="Robustness")
_files = partial(option, group="Files and batches")
_logs = partial(option, group="Observability")
SECONDS = (0.0, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server."""

    host: str = _server("127.0.0.1", "address to listen on")
    port: int = _server(8000, "port; 0 chooses a free one", within=(0, 65535))
    api_keys: tuple[str, ...] = ()
    """None given: everything is open."""
    admin_api_keys: tuple[str, ...] = ()
    """Keys that alone may load, unload and pin adapters; each is also an API key. None given: every client may."""
    database: str | None = field(default=None, repr=False)  # there may be a password in it
    """Address of the database of tenants and keys; None: there are no tenants."""
    journal: str | None = _tenants(
        None,
        "folder for the usage that the database does not have yet, one a server "
        "(default: next to a SQLite database, else below ~/.local/state/outrider/ledger)",
    )
    journal_max_bytes: int = _tenants(
        64 << 20,
        "disk that the journal may take while the database is away; then new requests are answered with 503",
        within=(1 << 20, 1 << 40),
    )
    shared_limits: bool = _tenants(
        False, "limits hold for all servers of the database that have this option; without it each server counts alone"
    )
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
    """Replaces the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of chat templates that requests leave out."""
    tool_call_parser: str | None = _server(
        None,
        "format in which the model calls tools (default: that of its tokenizer, else a guess from the chat template)",
        choices=tuple(TOOL_FORMATS),
    )
    reasoning_parser: str | None = _server(
        None,
        "format of the model's reasoning, which then is not in the content (default: none)",
        choices=tuple(REASONING_FORMATS),
    )
    trust_request_chat_template: bool = _server(
        False,
        "accept chat_template in requests: a template is a program, and one with nested loops can stall the server",
    )
    shutdown_timeout: float = _server(30.0, "seconds that running requests get after SIGTERM", within=SECONDS)
    engine_hang_timeout: float = _robustness(
        120.0,
        "seconds without a sign of life after which the engine is ended and started again; 0: never. It must be longer "
        "than any step takes",
        within=SECONDS,
    )
    max_connections: int = _robustness(2048, "open connections; more are answered with 503, except probes of health")
    client_timeout: float = _robustness(
        60.0,
        "seconds that a client gets to send its request, or to take something of its answer",
        within=SECONDS,
        low_open=True,
    )
    max_body_bytes: int = _robustness(8 << 20, "longest request body; a longer one is answered with 413")
    batch_dir: str | None = _files(
        None,
        "folder for the files that clients upload and the batches that they make, with their prompts and answers in "
        "plain text; several servers may share one (default: none, /v1/files and /v1/batches are off)",
    )
    batch_concurrency: int | None = _files(
        None, "requests of all batches that run at once (default: half of max_num_seqs)"
    )
    max_file_bytes: int = _files(200 << 20, "largest file that may be uploaded (default: 200MiB)", parse=parse_bytes)
    max_tenant_bytes: int = _files(
        2 << 30,
        "bytes that a tenant's files and batches take together; without tenants all clients are one (default: 2GiB)",
        parse=parse_bytes,
    )
    max_tenant_files: int = _files(1000, "files of a tenant, including those with the answers of batches")
    max_tenant_batches: int = _files(16, "batches of a tenant that have not ended")
    strict_fields: bool = _robustness(
        False,
        "refuse requests with fields that are unknown or do nothing, instead of naming them in the header "
        "x-outrider-ignored",
    )
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the API; "*" means all. None given: those of its own alone."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Options that were given and change nothing, with the reason: logged at the start."""
    log_level: str = _logs("warning", "level of the log", choices=("debug", "info", "warning", "error"))
    uvicorn_log_level: str | None = _logs(
        None,
        "level of the web server alone (default: log_level)",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    log_format: LogFormat = _logs(
        "text", "lines for people, or one JSON object a line, of both processes, on standard error", choices=FORMATS
    )
    log_requests: bool = False
    """One line for each request, without its text."""
    log_prompts: bool = _logs(False, "also write prompts and answers into the requests' lines")
    access_log: bool = _logs(False, "one line for each request as web servers write it")
    metrics_prefix: str = _logs(
        "outrider",
        "vllm: metrics have vLLM's names in addition to their own, such as vllm:num_requests_running",
        choices=("outrider", "vllm"),
    )
    open_metrics: bool = _logs(
        False, "with a database, show /metrics to everybody: tenants' names are in it (default: with an admin's key)"
    )
    otlp_endpoint: str | None = _logs(
        None,
        "send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318; needs "
        "pip install 'outrider[tracing]' (default: none)",
    )
