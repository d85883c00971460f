"""Start `outrider serve` for an example: the demo model on a free port, until the block ends."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def demo_server(*options: str) -> Iterator[str]:
    """Address of a running server, such as "http://127.0.0.1:40001"."""
    command = [sys.executable, "-m", "outrider.platform.cli.main", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            output = ""
            for line in process.stdout:
                output += line
                ready = re.search(r"ready on (http://\S+)", line)
                if ready is not None:
                    yield ready[1]
                    break
            else:
                raise RuntimeError(f"the server ended:\n{output}")
        finally:
            process.terminate()
            process.stdout.read()
