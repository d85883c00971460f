"""Options of `outrider serve` other than those of the engine."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from ....kernels.tuning import VARIABLE
from ...client.adapters.sources import SourceOptions
from ...http.server_config import ServerConfig
from .adapter_options import folder, lora_module, schemes
from .api_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, key
from .database_option import DATABASE_VARIABLE
from .field_flags import add_flags, flag
from .option_types import json_object, not_empty, size

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


def _repeated(text: str, metavar: str, parse: Any = str, **more: Any) -> dict[str, Any]:
    """An option that may be given several times; () when it is not."""
    return _option(text, metavar, type=parse, default=(), **{"action": _Append, **more})


class _Append(argparse.Action):
    """Action that collects values in a tuple; a list of values counts as several."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        more = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *more))


# group -> option -> arguments for argparse, of flags that are no field of `ServerConfig`, or that are parsed to one.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "Server": {
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
    },
    "Tenants": {
        "database": _option(
            "where tenants, their keys and limits, and the ledger of usage are: sqlite:///outrider.db or "
            "postgresql://user@host/name; `outrider admin` fills it "
            f"(default: the variable {DATABASE_VARIABLE}, else none: no tenants)",
            "URL",
        ),
    },
    "Robustness": {
        "cors_origin": _repeated(
            "origin of web pages that may call the API, such as https://example.com, or *; may be repeated, or be a "
            "JSON list (default: none)",
            "ORIGIN",
            _origins,
        ),
    },
    "Observability": {
        "log_requests": _option(
            "one line for each request: ids, tenant, key, adapter, counts, times, status; never a prompt "
            "(default: with --log-format json, and from --log-level info on)",
            action=argparse.BooleanOptionalAction,
            default=None,
        ),
    },
    "Adapters: where they come from, and what may be loaded over HTTP": {
        "lora_modules": _repeated(
            'adapters to serve, as name=path or {"name": ..., "path": ..., "draft_path": ...}; draft_path, the '
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
        "lora_upload_bytes": _option(
            "memory for the files of adapters that are loaded from memory, those that arrive too; a tenant's own get a "
            "quarter of it (default: 4GiB)",
            "SIZE",
            type=size,
            default=_SOURCES.max_upload_bytes,
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
    """Add the flags of `ServerConfig`, which a namespace has only if they are given, and those of the table."""
    groups = add_flags(parser, ServerConfig, checked=True)
    for title, options in OPTIONS.items():
        group = groups.get(title) or parser.add_argument_group(title)
        for name, option in options.items():
            settings = {"default": None, **option}
            if "(default" not in settings["help"] and settings["default"]:
                settings["help"] += " (default: %(default)s)"
            group.add_argument(flag(name), **settings)
