"""Options of `outrider serve` that limit the cost of clients and faults."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from ...http.server_config import ServerConfig

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
_OPTIONS = ("engine_hang_timeout", "max_connections", "client_timeout", "max_body_bytes", "strict_fields")


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group, defaults = parser.add_argument_group("robustness"), ServerConfig()
    group.add_argument(
        "--max-connections",
        type=_positive,
        default=defaults.max_connections,
        metavar="N",
        help="open connections; more are answered with 503 (default: %(default)s)",
    )
    group.add_argument(
        "--client-timeout",
        type=seconds_above(0.0),
        default=defaults.client_timeout,
        metavar="X",
        help="seconds that a client gets to send its request, or to take something of its answer "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=_positive,
        default=defaults.max_body_bytes,
        metavar="N",
        help="longest request body; a longer one is answered with 413 (default: %(default)s)",
    )
    group.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse requests with fields that are unknown or do nothing, instead of naming them in the header "
        "x-outrider-ignored",
    )
    group.add_argument(
        "--cors-origin",
        type=_origins,
        action="extend",
        metavar="ORIGIN",
        help="origin of web pages that may call the API, such as https://example.com, or *; may be repeated, or be a "
        "JSON list (default: none)",
    )
    group.add_argument(
        "--engine-hang-timeout",
        type=seconds_above(-1.0),
        default=defaults.engine_hang_timeout,
        metavar="X",
        help="seconds without a sign of life after which the engine is ended and started again; 0: never "
        "(default: %(default)s)",
    )


def limits(namespace: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerConfig` that these flags set."""
    given = {name: getattr(namespace, name) for name in _OPTIONS}
    return given | {"cors_origins": tuple(namespace.cors_origin or ())}


def _positive(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


def _origins(text: str) -> list[str]:
    """Parse origins: an argparse type. Only the form that browsers send can match."""
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


def seconds_above(least: float) -> Callable[[str], float]:
    """Make an argparse type of seconds: finite, not negative, and more than `least`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (value > least and 0.0 <= value < float("inf")):
            raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
        return value

    return parse
