"""Flags of vLLM that `outrider serve` takes without having what they are about: see `core.vllm_options`."""

from __future__ import annotations

import argparse
from typing import Any

from ..core.vllm_options import ALIASES, ENGINE, SERVER, without_effect
from .engine_options import flag
from .parser import Parser, plain

_TABLE = {**ENGINE, **SERVER}


def add_vllm_flags(parser: Parser) -> None:
    """Add those that the parser does not have yet, unseen in its help: after all others."""
    for name, option in _TABLE.items():
        if parser.knows(flag(name)) or flag(name) in ALIASES:
            continue
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if option.flag:
            parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, **common)
        else:
            parser.add_argument(flag(name), type=plain, **common)


def flags_without_effect(namespace: argparse.Namespace, speculative_config: object) -> dict[str, str]:
    """The names of those that were given and change nothing, with the reason.

    Raises:
        InvalidRequestError: one that would change something; `param` names it.
    """
    given = {name: getattr(namespace, name) for name in _TABLE if hasattr(namespace, name)}
    return without_effect(given, _TABLE, speculative_config)
