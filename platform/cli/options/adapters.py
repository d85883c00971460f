"""Options of `outrider serve` for adapters: the served ones, the sources of others, and who may load them."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any, NamedTuple

from ...client.adapters.sources import SourceOptions
from ...core.compat.foreign_options import check_foreign
from ...core.compat.vllm_python import LORA
from ...core.errors import InvalidRequestError
from ...core.sizes import parse_bytes
from ...core.text import shorten

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_LOCAL = ("file", "local")


def add_adapter_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, in a group of their own."""
    group = parser.add_argument_group("adapters: where they come from, and what may be loaded over HTTP")
    group.add_argument(
        "--lora-modules",
        type=lora_module,
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help='adapters to serve, as name=path or {"name": ..., "path": ..., "draft_path": ...}, where draft_path, the '
        "folder of draft weights, may be left out (default: draft/ in path); a path may also be a hub id, org/name or "
        "org/name@revision, or a URL such as s3://bucket/folder; implies --enable-lora",
    )
    group.add_argument(
        "--lora-dir",
        type=_folder,
        action="append",
        metavar="PATH",
        help="folder whose subfolders are adapters, each served by its name from its first request on; new ones are "
        "found without a restart; may be repeated; implies --enable-lora",
    )
    group.add_argument(
        "--lora-root",
        type=_folder,
        action="append",
        metavar="PATH",
        help="folder below which adapters may be loaded over HTTP; may be repeated (always allowed: --lora-dir, and "
        "the folders around those of --lora-modules)",
    )
    group.add_argument(
        "--lora-remote",
        type=_schemes,
        default=(),
        metavar="hf,s3,...",
        help="other sources from which adapters may be loaded over HTTP, by their schemes; hf is the hub "
        "(default: none)",
    )
    _add_limits(group)
    group.add_argument(
        "--lora-resolver",
        action="append",
        metavar="MODULE:FACTORY",
        help="plug-in that finds adapters by name or source; may be repeated; implies --enable-lora",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    defaults = SourceOptions()
    group.add_argument(
        "--max-lora-bytes",
        type=_size,
        default=defaults.max_adapter_bytes,
        metavar="SIZE",
        help="largest adapter, all its files together, that is fetched, found by name or loaded over HTTP "
        "(default: 4GiB)",
    )
    group.add_argument(
        "--lora-cache-dir",
        metavar="PATH",
        help="where adapters of object stores are downloaded to (default: ~/.cache/outrider/adapters)",
    )
    group.add_argument(
        "--lora-cache-bytes",
        type=_size,
        default=defaults.max_cache_bytes,
        metavar="SIZE",
        help="how much of them is kept; those in use always are (default: 32GiB)",
    )


def _folder(text: str) -> str:
    text = os.path.expanduser(text)
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"there is no folder {shorten(text)!r}")
    return os.path.abspath(text)


def _schemes(text: str) -> tuple[str, ...]:
    schemes = tuple(part.strip().lower() for part in text.split(","))
    for scheme in schemes:
        if not _SCHEME.fullmatch(scheme):
            raise argparse.ArgumentTypeError(f"must be schemes such as hf,s3,gs; got {shorten(text)!r}")
        if scheme in _LOCAL:
            raise argparse.ArgumentTypeError(f"{scheme}:// means local folders, which --lora-root allows")
    return schemes


def _size(text: str) -> int:
    try:
        return parse_bytes("it", text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


class LoraModule(NamedTuple):
    """One value of --lora-modules."""

    name: str
    path: str
    draft_path: str | None = None


def lora_module(text: str) -> LoraModule:
    """An argparse type: "name=path" or a JSON object with name, path and, maybe, draft_path."""
    name: object
    path: object
    draft_path: str | None = None
    if text.lstrip().startswith("{"):
        try:
            module = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
        unknown = sorted(set(module) - {"name", "path", "draft_path", *LORA})
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown field {unknown[0]!r}; known are name, path and draft_path")
        try:
            check_foreign(module, LORA)
        except InvalidRequestError as error:
            raise argparse.ArgumentTypeError(error.message) from None
        name, path, draft_path = module.get("name"), module.get("path"), module.get("draft_path")
        if draft_path is not None and (not isinstance(draft_path, str) or not draft_path):
            raise argparse.ArgumentTypeError(f"draft_path must be a folder, got {shorten(str(draft_path))!r}")
    else:
        name, _, path = text.partition("=")
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise argparse.ArgumentTypeError(f'must be name=path or {{"name": ..., "path": ...}}, got {shorten(text)!r}')
    return LoraModule(name, path, draft_path)


def lora_modules(namespace: argparse.Namespace) -> dict[str, LoraModule]:
    """The adapters of --lora-modules, by name.

    Raises:
        InvalidRequestError: a name is given twice.
    """
    modules: dict[str, LoraModule] = {}
    for module in namespace.lora_modules or ():
        if module.name in modules:
            raise InvalidRequestError(f"the name {module.name!r} is given twice", param="lora_modules")
        modules[module.name] = module
    return modules


def enable_lora(namespace: argparse.Namespace, given: dict[str, Any]) -> None:
    """Switch LoRA on when an option names adapters or a source of them.

    Raises:
        InvalidRequestError: it has been switched off.
    """
    for option in ("lora_modules", "lora_dir", "lora_resolver"):
        if getattr(namespace, option) and given.setdefault("enable_lora", True) is False:
            raise InvalidRequestError("needs LoRA, which --no-enable-lora switches off", param=option)


def adapter_sources(namespace: argparse.Namespace) -> SourceOptions:
    """The sources of adapters, from the options."""
    return SourceOptions(
        directories=tuple(namespace.lora_dir or ()),
        roots=tuple(namespace.lora_root or ()),
        resolvers=tuple(namespace.lora_resolver or ()),
        cache_dir=namespace.lora_cache_dir,
        max_cache_bytes=namespace.lora_cache_bytes,
        max_adapter_bytes=namespace.max_lora_bytes,
    )
