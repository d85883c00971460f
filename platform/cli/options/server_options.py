"""Options of `outrider serve` other than those of the engine: one table of flags."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

from ....kernels.tuning import VARIABLE
from ...client.adapters.sources import SourceOptions
from ...core.logs import FORMATS
from ...http.openai.tools.formats import FORMATS as TOOL_FORMATS
from ...http.openai.tools.formats import REASONING_FORMATS
from ...http.server_config import ServerConfig
from .adapter_options import folder, lora_module, schemes
from .api_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, key
from .database_option import DATABASE_VARIABLE
from .field_flags import flag
from .option_types import integer, json_object, not_empty, not_negative, number, positive, size

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
_MIN_JOURNAL_BYTES = 1 << 20
_SOURCES = SourceOptions()


def _origins(text: str) -> list[str]:
    """Type of origins of web pages. Only the form that browsers send can match."""
    try:
        origins = json.loads(text) if text.startswith("[") else [text]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    for origin in origins:
        if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
            raise argparse.ArgumentTypeError(
                f"must be an origin such as https://example.com (no path), or *, got {origin!r}"
            )
    return list(origins)


def _option(text: str, metavar: str | None = None, **more: Any) -> dict[str, Any]:
    return {"help": text, **({"metavar": metavar} if metavar is not None else {}), **more}


def _switch(text: str) -> dict[str, Any]:
    return _option(text, action="store_true")


def _repeated(text: str, metavar: str, parse: Any = str, **more: Any) -> dict[str, Any]:
    """An option that may be given several times; () when it is not."""
    return _option(text, metavar, type=parse, default=(), **{"action": _Append, **more})


class _Append(argparse.Action):
    """Action that collects values in a tuple; a list of values counts as several."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        more = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *more))


# group -> option -> arguments for argparse. The default is that of the field of the same name in `ServerConfig`.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "Server": {
        "host": _option("address to listen on"),
        "port": _option("port; 0 chooses a free one", "N", type=integer(0, 65535)),
        "api_key": _repeated(
            "key that clients must send; may be repeated; not with --database "
            f"(default: the variable {API_KEY_VARIABLE}, else open)",
            "KEY",
            key,
        ),
        "admin_api_key": _repeated(
            "key that alone may load, unload and pin adapters; may be repeated "
            f"(default: the variable {ADMIN_API_KEY_VARIABLE}, else every client may)",
            "KEY",
            key,
        ),
        "served_model_name": _option(
            "names of the model in the API, and no others (default: the last part of MODEL; requests may also use "
            "MODEL as it is given here, its path and its hub id)",
            "NAME",
            type=not_empty,
            nargs="+",
        ),
        "chat_template": _option(
            "Jinja template that takes the place of the model's; also the template itself", "FILE"
        ),
        "default_chat_template_kwargs": _option(
            "variables of the chat template that requests leave out of their chat_template_kwargs, such as "
            '{"enable_thinking": false}',
            "JSON",
            type=json_object,
            default={},
        ),
        "tool_call_parser": _option(
            "format in which the model calls tools: " + ", ".join(TOOL_FORMATS) + " (default: that of its tokenizer, "
            "else a guess from the chat template)",
            "NAME",
            choices=list(TOOL_FORMATS),
        ),
        "reasoning_parser": _option(
            "format of the model's reasoning, which then is not in the content: "
            + ", ".join(REASONING_FORMATS)
            + " (default: none)",
            "NAME",
            choices=list(REASONING_FORMATS),
        ),
        "trust_request_chat_template": _switch("accept chat_template in requests: templates can loop"),
        "shutdown_timeout": _option("seconds that running requests get after SIGTERM", "X", type=not_negative),
    },
    "Tenants": {
        "database": _option(
            "where tenants, their keys and limits, and the ledger of usage are: sqlite:///outrider.db or "
            "postgresql://user@host/name; `outrider admin` fills it "
            f"(default: the variable {DATABASE_VARIABLE}, else none: no tenants)",
            "URL",
        ),
        "journal": _option(
            "folder for the usage that the database does not have yet, one a server "
            "(default: next to a SQLite database, else below ~/.local/state/outrider/ledger)",
            "PATH",
        ),
        "journal_max_bytes": _option(
            "disk that it may take while the database is away; then new requests are answered with 503",
            "N",
            type=integer(_MIN_JOURNAL_BYTES, 1 << 40),
        ),
        "shared_limits": _switch(
            "limits hold for all servers of the database that have this option; without it each server counts alone"
        ),
    },
    "Robustness": {
        "max_connections": _option("open connections; more are answered with 503", "N", type=positive),
        "client_timeout": _option(
            "seconds that a client gets to send its request, or to take something of its answer",
            "X",
            type=number("of seconds greater than 0", lambda value: 0 < value < math.inf),
        ),
        "max_body_bytes": _option("longest request body; a longer one is answered with 413", "N", type=positive),
        "strict_fields": _switch(
            "refuse requests with fields that are unknown or do nothing, instead of naming them in the header "
            "x-outrider-ignored"
        ),
        "cors_origin": _repeated(
            "origin of web pages that may call the API, such as https://example.com, or *; may be repeated, or be a "
            "JSON list (default: none)",
            "ORIGIN",
            _origins,
        ),
        "engine_hang_timeout": _option(
            "seconds without a sign of life after which the engine is ended and started again; 0: never",
            "X",
            type=not_negative,
        ),
    },
    "Files and batches": {
        "batch_dir": _option(
            "folder for the files that clients upload and the batches that they make, with their prompts and answers "
            "in plain text; several servers may share one (default: none, /v1/files and /v1/batches are off)",
            "PATH",
        ),
        "batch_concurrency": _option(
            "requests of all batches that run at once (default: half of --max-num-seqs)", "N", type=positive
        ),
        "max_file_bytes": _option("largest file that may be uploaded (default: 200MiB)", "SIZE", type=size),
        "max_tenant_bytes": _option(
            "what a tenant's files and batches take together; without tenants all clients are one (default: 2GiB)",
            "SIZE",
            type=size,
        ),
        "max_tenant_files": _option("files of a tenant, those with the answers of batches too", "N", type=positive),
        "max_tenant_batches": _option("batches of a tenant that have not ended", "N", type=positive),
    },
    "Observability": {
        "log_level": _option("of the log", choices=("debug", "info", "warning", "error")),
        "log_format": _option(
            "lines for people, or one JSON object a line, of both processes, on standard error", choices=FORMATS
        ),
        "log_requests": _option(
            "one line for each request: ids, tenant, key, adapter, counts, times, status; never a prompt "
            "(default: with --log-format json, and from --log-level info on)",
            action=argparse.BooleanOptionalAction,
            default=None,
        ),
        "log_prompts": _switch("also write prompts and answers into those lines (default: never)"),
        "uvicorn_log_level": _option(
            "of the web server alone (default: --log-level)",
            choices=("critical", "error", "warning", "info", "debug", "trace"),
        ),
        "access_log": _switch("one line for each request as web servers write it"),
        "metrics_prefix": _option(
            "vllm: show the metrics that vLLM has under its names, too, such as vllm:num_requests_running",
            choices=("outrider", "vllm"),
        ),
        "open_metrics": _switch(
            "with --database, show /metrics to everybody: tenants' names are in it (default: with an admin's key)"
        ),
        "otlp_endpoint": _option(
            "send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318; "
            "needs pip install 'outrider[tracing]' (default: none)",
            "URL",
        ),
    },
    "Adapters: where they come from, and what may be loaded over HTTP": {
        "lora_modules": _repeated(
            'adapters to serve, as name=path or {"name": ..., "path": ..., "draft_path": ...}, where draft_path, the '
            "folder of draft weights, may be left out (default: draft/ in path); a path may also be a hub id, org/name "
            "or org/name@revision, or a URL such as s3://bucket/folder; implies --enable-lora",
            "NAME=PATH",
            lora_module,
            nargs="+",
        ),
        "lora_dir": _repeated(
            "folder whose subfolders are adapters, each served by its name from its first request on; new ones are "
            "found without a restart; may be repeated; implies --enable-lora",
            "PATH",
            folder,
        ),
        "lora_root": _repeated(
            "folder below which adapters may be loaded over HTTP; may be repeated (always allowed: --lora-dir, and "
            "the folders around those of --lora-modules)",
            "PATH",
            folder,
        ),
        "lora_remote": _option(
            "other sources from which adapters may be loaded over HTTP, by their schemes; hf is the hub "
            "(default: none)",
            "hf,s3,...",
            type=schemes,
        ),
        "max_lora_bytes": _option(
            "largest adapter, all its files together, that is fetched, found by name or loaded over HTTP "
            "(default: 4GiB)",
            "SIZE",
            type=size,
            default=_SOURCES.max_adapter_bytes,
        ),
        "lora_cache_dir": _option(
            "where adapters of object stores are downloaded to (default: ~/.cache/outrider/adapters)", "PATH"
        ),
        "lora_cache_bytes": _option(
            "how much of them is kept; those in use always are (default: 32GiB)",
            "SIZE",
            type=size,
            default=_SOURCES.max_cache_bytes,
        ),
        "lora_resolver": _repeated(
            "plug-in that finds adapters by name or source; may be repeated; implies --enable-lora", "MODULE:FACTORY"
        ),
    },
    "Kernels": {
        "kernel_configs": _option(
            "file of `tools/tune`, or a folder of them, for the GPU kernels "
            f"(default: the variable {VARIABLE}, else those that come with Outrider)",
            "PATH",
        )
    },
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table."""
    defaults = ServerConfig()
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, option in options.items():
            settings = {"default": getattr(defaults, name, None), **option}
            if "(default" not in settings["help"] and settings["default"]:
                settings["help"] += " (default: %(default)s)"
            group.add_argument(flag(name), **settings)
