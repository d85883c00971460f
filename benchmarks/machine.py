"""Description of the machine, code and command of a result."""

from outrider.platform.cli.bench.machine import describe_machine

__all__ = ["describe_machine"]
