"""vLLM's flags of `core.compat.vllm_options`, which `outrider serve` accepts and then ignores or refuses."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ...core.compat.vllm_options import ALIASES, ENGINE, SERVER, without_effect
from ...http.server_config import ServerConfig
from .field_flags import flag
from .parser import Parser, plain

_TABLE = {**ENGINE, **SERVER}


def add_vllm_flags(parser: Parser) -> None:
    """Add the flags that the parser does not have yet, hidden in its help. Call this after all other flags."""
    for name, option in _TABLE.items():
        if parser.knows(flag(name)) or flag(name) in ALIASES:
            continue
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if option.flag:
            parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, **common)
        elif name == "hf_token":  # without a value: the token that the hub's library has stored
            parser.add_argument(flag(name), type=plain, nargs="?", const=True, **common)
        else:
            parser.add_argument(flag(name), type=plain, **common)


def flags_without_effect(namespace: argparse.Namespace, speculative_config: object) -> dict[str, str]:
    """Given flags that change nothing, by name, with the reason.

    Raises:
        InvalidRequestError: a flag would change the behaviour; `param` names it.
    """
    own = {field.name for field in dataclasses.fields(ServerConfig)}
    given = {name: getattr(namespace, name) for name in _TABLE if hasattr(namespace, name) and name not in own}
    return without_effect(given, _TABLE, speculative_config)
