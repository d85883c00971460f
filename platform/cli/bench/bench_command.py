"""`outrider bench`: the command line of the measurements. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from .latency import latency_command
from .lora import lora_command
from .serving import serve_command
from .speculation import speculation_command


def add_parser(commands: Any) -> None:
    """Add `bench` with its measurements."""
    bench = commands.add_parser("bench", help="measure", description="Measurements that you can repeat.")
    kinds = bench.add_subparsers(title="measurements", required=True, metavar="WHAT")
    for command in (latency_command, serve_command, speculation_command, lora_command):
        command.add_parser(kinds)
