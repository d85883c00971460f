"""`outrider admin prefix`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidRequestError
from ...tenancy.accounts.records import SharedPrefix

if TYPE_CHECKING:
    from ...tenancy.database.store import Store
    from .admin_command import Commands

_COLUMNS = ("name", "num_tokens", "created_at")


def add_commands(admin: Commands) -> None:
    """Add the commands."""
    group = admin.group("prefix", "prefixes of prompts whose KV all tenants share, as they are no secret")
    add = group.add("add", _add, "declare a shared prompt prefix")
    add.add_argument("name", metavar="NAME")
    source = add.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", metavar="FILE", help="a file with the text, as in `prompt` of /v1/completions; - is stdin"
    )
    source.add_argument(
        "--token-ids", metavar="FILE", help="a file with a JSON list, such as `tokens` of /tokenize; - is stdin"
    )
    add.add_argument("--tokenizer", metavar="PATH", help="folder of the model, for --text (default: the demo model)")
    group.add("list", _list, "list the shared prefixes", _COLUMNS)
    group.add("remove", _remove, "share a prefix no more").add_argument("name", metavar="NAME")


def _row(prefix: SharedPrefix) -> dict[str, Any]:
    return {"name": prefix.name, "num_tokens": len(prefix.token_ids), "created_at": prefix.created_at}


def _add(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    if namespace.text is not None:
        tokens = _tokenize(_read(namespace.text, "text"), namespace.tokenizer)
    else:
        tokens = _parse(_read(namespace.token_ids, "token_ids"))
    return _row(store.add_prefix(namespace.name, tokens))


def _list(store: Store, namespace: argparse.Namespace) -> list[dict[str, Any]]:
    return [_row(prefix) for prefix in store.list_prefixes()]


def _remove(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    store.remove_prefix(namespace.name)
    return {"name": namespace.name, "removed": True}


def _read(name: str, option: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"{option}: cannot read {name}: {error}", param=option) from None


def _parse(text: str) -> list[int]:
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"token_ids: not JSON: {error}", param="token_ids") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InvalidRequestError("token_ids: must be a JSON list of integers", param="token_ids")
    return tokens


def _tokenize(text: str, folder: str | None) -> list[int]:
    from ....models.checkpoint.tokenizer import load_tokenizer
    from ....models.demo import demo_model_path

    return list(load_tokenizer(folder or demo_model_path()).encode(text))
