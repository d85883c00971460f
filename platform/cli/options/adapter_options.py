"""Values of the options of `outrider serve` for adapters: the served ones, and the sources of others."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any, NamedTuple

from ...client.adapters.sources import SourceOptions
from ...core.compat.unsupported_options import check_unsupported_options
from ...core.compat.vllm_python import LORA
from ...core.errors import InvalidRequestError
from ...core.text import shorten

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_LOCAL = ("file", "local")


def folder(text: str) -> str:
    """Type of folders that are there."""
    text = os.path.expanduser(text)
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"there is no folder {shorten(text)!r}")
    return os.path.abspath(text)


def schemes(text: str) -> tuple[str, ...]:
    """Type of schemes of remote sources, with commas between them."""
    found = tuple(part.strip().lower() for part in text.split(","))
    for scheme in found:
        if not _SCHEME.fullmatch(scheme):
            raise argparse.ArgumentTypeError(f"must be schemes such as hf,s3,gs; got {shorten(text)!r}")
        if scheme in _LOCAL:
            raise argparse.ArgumentTypeError(f"{scheme}:// means local folders, which --lora-root allows")
    return found


class LoraModule(NamedTuple):
    """One value of --lora-modules."""

    name: str
    path: str
    draft_path: str | None = None


def lora_module(text: str) -> LoraModule:
    """Type of adapters: "name=path" or a JSON object with name, path and, maybe, draft_path."""
    first, _, second = text.partition("=")
    module: dict[str, Any] = {"name": first, "path": second}
    if text.lstrip().startswith("{"):
        try:
            module = json.loads(text)
            unknown = sorted(set(module) - {"name", "path", "draft_path", *LORA})
            if unknown:
                raise argparse.ArgumentTypeError(f"unknown field {unknown[0]!r}; known are name, path and draft_path")
            check_unsupported_options(module, LORA)
        except InvalidRequestError as error:
            raise argparse.ArgumentTypeError(error.message) from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    name, path, draft = module.get("name"), module.get("path"), module.get("draft_path")
    if draft is not None and (not isinstance(draft, str) or not draft):
        raise argparse.ArgumentTypeError(f"draft_path must be a folder, got {shorten(str(draft))!r}")
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise argparse.ArgumentTypeError(f'must be name=path or {{"name": ..., "path": ...}}, got {shorten(text)!r}')
    return LoraModule(name, path, draft)


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
        directories=tuple(namespace.lora_dir),
        roots=tuple(namespace.lora_root),
        resolvers=tuple(namespace.lora_resolver),
        cache_dir=namespace.lora_cache_dir,
        max_cache_bytes=namespace.lora_cache_bytes,
        max_adapter_bytes=namespace.max_lora_bytes,
        max_upload_bytes=namespace.lora_upload_bytes,
    )
