"""A server in a process of its own, for tests that run in an environment without this package."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("OUTRIDER_PYTHON", str(ROOT / ".venv/bin/python"))
"""Python that serves."""


@contextmanager
def running_server(*arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Address of `outrider serve` with these arguments and a free port, once it is ready."""
    command = [PYTHON, "-m", "outrider.platform.cli.main", "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict(environment or {}),
        cwd=folder,
    ) as process:
        output = ""
        try:
            assert process.stdout is not None
            for line in process.stdout:
                output += line
                ready = re.search(r"is ready on (http://\S+)", line)
                if ready is not None:
                    break
            else:
                raise RuntimeError(f"the server ended:\n{output}")
            yield ready[1]
        finally:
            process.terminate()
            process.communicate(timeout=60)
