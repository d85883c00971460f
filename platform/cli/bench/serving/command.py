"""The measurements of serving. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from . import latency, serve, throughput


def add_parsers(kinds: Any) -> None:
    """Add `latency`, `throughput` and `serve`."""
    for command in (latency, throughput, serve):
        command.add_parser(kinds)
