"""Options that set the limits of tenants and keys."""

from __future__ import annotations

import argparse
from typing import Any

from ...tenancy.accounts.principal import PERIODS
from ..options.option_types import natural

_COUNTS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "prompt and output tokens a minute",
    "max_concurrent_requests": "requests at once; others wait",
    "max_queued_requests": "requests that may wait for that",
    "max_context_tokens": "tokens of one request, prompt and output",
    "max_output_tokens": "output tokens of one request",
    "token_budget": "tokens a period",
}


def add_limit_options(parser: argparse.ArgumentParser, *, change: bool = False) -> None:
    """Add the flags. With `change` the value "none" removes a limit."""
    group = parser.add_argument_group(
        "limits", "none takes a limit away" if change else "without one there is no bound"
    )
    for name, text in _COUNTS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_count_or_none if change else natural,
            default=argparse.SUPPRESS,
            metavar="N",
            help=text,
        )
    group.add_argument("--budget-period", choices=PERIODS, default=argparse.SUPPRESS, help="in UTC (default: month)")
    group.add_argument(
        "--allowed-adapters",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="adapters that may be used in addition to the base model; with no name: none",
    )
    if change:
        group.add_argument(
            "--any-adapter",
            action="store_const",
            const=None,
            dest="allowed_adapters",
            default=argparse.SUPPRESS,
            help="take --allowed-adapters away",
        )


def given_limits(namespace: argparse.Namespace) -> dict[str, Any]:
    """Limits that the command line gives."""
    names = (*_COUNTS, "budget_period", "allowed_adapters")
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def _count_or_none(text: str) -> int | None:
    return None if text == "none" else natural(text)
