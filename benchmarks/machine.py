"""What a result was measured on."""

from outrider.platform.cli.bench.machine import describe_machine

__all__ = ["describe_machine"]
