"""Options of the engine: one flag for each field of EngineArgs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...core.compat.vllm_options import VALUES
from ...core.config import EngineArgs, check_args
from ...core.errors import InvalidRequestError
from ...core.speculative_config import parse_speculative
from .field_flags import add_flags, given_fields

_NO_FLAG = ("model", "served_model_name")
"""Fields without a flag here: `model` is the command's argument, and the served names have a flag of the server."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags in groups. The namespace has only the given ones."""
    groups = add_flags(parser, EngineArgs, leave_out=_NO_FLAG, spellings=VALUES)
    groups["Speculative decoding"].add_argument(
        "--no-speculation", action="store_true", help='the same as --speculative-config \'{"method": "off"}\''
    )


def resolve_engine(
    namespace: argparse.Namespace, model: str | None, given: dict[str, Any]
) -> tuple[EngineArgs, dict[str, Path]]:
    """The options of the engine: those given, else the demo's for the demo; and the demo's adapters (name -> folder).

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    from ...client.demo_defaults import apply_demo_defaults

    if namespace.no_speculation:
        if given.get("speculative_config") is not None:
            raise InvalidRequestError("not allowed together with --speculative-config", param="no_speculation")
        given["speculative_config"] = {"method": "off"}
    args, demo_adapters = apply_demo_defaults(EngineArgs(model=model, **given), given)
    check_args(args)
    parse_speculative(args.speculative_config)
    return args, demo_adapters


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Options of EngineArgs that the command line gives, with their values."""
    return given_fields(EngineArgs, namespace, _NO_FLAG)
