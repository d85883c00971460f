"""`outrider bench`: the command line of the measurements. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from .lora import lora_command as lora
from .serving import command as serving
from .speculation import speculation_command as speculation


def add_parser(commands: Any) -> None:
    """Add `bench` with its measurements."""
    bench = commands.add_parser("bench", help="measure", description="Measurements that you can repeat.")
    kinds = bench.add_subparsers(title="measurements", required=True, metavar="WHAT")
    serving.add_parsers(kinds)
    speculation.add_parser(kinds)
    lora.add_parser(kinds)
