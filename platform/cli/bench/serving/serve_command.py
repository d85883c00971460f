"""`outrider bench serve`: modes, adapters or tenants side by side, over HTTP. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ...options.api_keys import API_KEY_VARIABLE
from ...options.option_types import json_object, natural, not_negative, number, positive
from ..bench_options import Result, add_measurement

_DESCRIPTION = """\
The same prompts to each group: a mode, an adapter, a tenant or a server. Groups take turns, so that a noisy machine
disturbs all alike; with --together they send at the same time, and each has figures of its own. A group's settings are
base_url, api_key_env (a variable with its key), request_rate (requests a second), max_concurrency and num_prompts;
every other setting is a field of its requests, as JSON or text:

  outrider bench serve --group off speculative=false --group "4 drafts" speculative=4
  outrider bench serve --group json model=json --group sql model=sql --together
  outrider bench serve --group calm api_key_env=CALM request_rate=2 --group flood api_key_env=FLOOD --together
"""
_RATE = number("greater than 0, or inf", lambda value: value > 0)


@dataclass(frozen=True)
class Group:
    """Requests that are measured together."""

    name: str
    base_url: str
    api_key: str | None = field(repr=False)
    request_rate: float
    """Requests a second at random times (a Poisson process); inf sends all at once."""
    max_concurrency: int | None
    """Requests in flight at most; None for no limit."""
    num_prompts: int
    fields: dict[str, Any]
    """Fields of every request's body."""

    def as_dict(self) -> dict[str, Any]:
        """The group for a report, without its key."""
        rate = None if math.isinf(self.request_rate) else self.request_rate
        limits = {"request_rate": rate, "max_concurrency": self.max_concurrency, "num_prompts": self.num_prompts}
        return {"base_url": self.base_url, **limits, "fields": self.fields}


def add_parser(kinds: Any) -> None:
    """Add `serve`."""
    short = "modes, adapters or tenants side by side, over HTTP"
    parser = add_measurement(kinds, "serve", measure, _DESCRIPTION, short)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--group", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"), help="may be repeated (default: one)")
    add("--together", action="store_true", help="groups send at the same time instead of in turn")
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server (default: %(default)s)")
    text = "lines with prompt, messages or prompt_token_ids, and adapter (default: questions to the demo model)"
    add("--prompts", metavar="FILE.jsonl", type=Path, help=text)
    add("--num-prompts", type=positive, default=100, metavar="N", help="requests of a group (default: %(default)s)")
    add("--output-len", type=positive, default=128, metavar="N", help="output tokens at most (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="have every answer be as long as it may")
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="(default: 0, greedy)")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields for every request")
    add("--request-rate", type=_RATE, default=math.inf, metavar="R", help="requests a second (default: inf)")
    add("--max-concurrency", type=positive, metavar="N", help="requests of a group in flight at most")
    add("--rounds", type=positive, default=3, metavar="N", help="of every group (default: %(default)s)")
    add("--seed", type=natural, default=0, metavar="N", help="of the arrivals (default: 0)")


def measure(options: argparse.Namespace) -> Result:
    """Measure with the options of the command."""
    groups = make_groups(options)
    from .side_by_side import measure_groups

    return measure_groups(options, groups)


def make_groups(options: argparse.Namespace) -> list[Group]:
    """Groups of the command line, or one called "all".

    Raises:
        InvalidRequestError: a setting is wrong, or a name is there twice.
    """
    groups = [_group(name, settings, options) for name, *settings in options.group or [["all"]]]
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"every group needs a name of its own, got {', '.join(names)}", param="group")
    return groups


def _group(name: str, settings: Sequence[str], options: argparse.Namespace) -> Group:
    pairs = dict(setting.partition("=")[::2] for setting in settings)
    if "=" in name or "" in pairs or not all("=" in setting for setting in settings):
        raise InvalidRequestError(f"must be NAME KEY=VALUE ..., got {' '.join([name, *settings])}", param="group")

    def setting(key: str, parse: Any) -> Any:
        try:
            return parse(pairs.pop(key)) if key in pairs else getattr(options, key)
        except argparse.ArgumentTypeError as error:
            raise InvalidRequestError(f"{name}: {key} {error}", param="group") from None

    variable = pairs.pop("api_key_env", API_KEY_VARIABLE)
    if variable != API_KEY_VARIABLE and not os.environ.get(variable):
        raise InvalidRequestError(f"{name}: the variable {variable} holds no key", param="group")
    return Group(
        name,
        setting("base_url", str).rstrip("/"),
        os.environ.get(variable) or None,
        setting("request_rate", _RATE),
        setting("max_concurrency", positive),
        setting("num_prompts", positive),
        {key: _value(text) for key, text in pairs.items()},
    )


def _value(text: str) -> Any:
    """Value of a field: JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
