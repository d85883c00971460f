"""`outrider bench`: the command line of the measurements. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from . import compare
from .lora import lora_command
from .serving import serving_commands
from .speculation import speculation_command


def add_parser(commands: Any) -> None:
    """Add `bench` with its measurements."""
    bench = commands.add_parser("bench", help="measure", description="Measurements that you can repeat.")
    kinds = bench.add_subparsers(title="measurements", required=True, metavar="WHAT")
    serving_commands.add_parsers(kinds)
    compare.add_parser(kinds)
    speculation_command.add_parser(kinds)
    lora_command.add_parser(kinds)
