"""The measurements of serving. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from .. import compare
from . import latency, serve, throughput


def add_parsers(kinds: Any) -> None:
    """Add `latency`, `throughput`, `serve` and `compare`."""
    for command in (latency, throughput, serve, compare):
        command.add_parser(kinds)
