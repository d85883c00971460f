"""Profiler of torch around the steps of an engine, switched on and off while it serves."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

import torch

from ..core.errors import InvalidRequestError, InvalidUserInputError, invalid

_ROWS = 40
"""Operations in the table."""


class Profiler:
    """Profiler of the engine's thread, and of its GPU."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._file = Path()

    def start(self, folder: str, prefix: str) -> None:
        """Start recording, which slows steps down.

        Raises:
            InvalidUserInputError: this process is already recording a profile.
            InvalidRequestError: the folder cannot be made.
        """
        # torch has one profiler per process; stopping a second one kills the process.
        if torch.autograd.profiler._is_profiler_enabled:
            raise InvalidUserInputError("a profile is being recorded already in this process: stop it first")
        if "/" in prefix or "\0" in prefix:
            raise invalid("prefix", f"must be the first part of a file name, got {prefix!r}")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(f"the folder of the profile cannot be made: {error}", param="folder") from error
        self._file = Path(folder) / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json"
        self._running = torch.profiler.profile()
        self._running.start()
        atexit.register(self.close)  # a process that exits while torch records crashes with a segmentation fault

    def stop(self) -> str:
        """Stop, and write a trace for chrome://tracing or Perfetto, and next to it a table of operations (.txt);
        returns the trace's path.

        Raises:
            InvalidUserInputError: nothing is being recorded. InvalidRequestError: the files cannot be written.
        """
        if self._running is None:
            raise InvalidUserInputError("no profile is being recorded: call start_profile() first")
        running, self._running = self._running, None
        running.stop()
        atexit.unregister(self.close)
        try:
            running.export_chrome_trace(str(self._file))
            table = running.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS)
            self._file.with_suffix(".txt").write_text(table, encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"the profile cannot be written: {error}", param="folder") from error
        return str(self._file)

    def close(self) -> None:
        """Stop without a file."""
        if self._running is not None:
            self._running.stop()
            self._running = None
            atexit.unregister(self.close)
