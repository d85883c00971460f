"""Journal of a batch's answers: one line for each finished request, appended as soon as it is there.

After a crash the journal says which requests are finished. What follows the last whole line is cut off, and those
requests are answered again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import msgspec

from ..files.disk import open_append, write_all
from .lines import CustomIds


class _Written(msgspec.Struct):
    """Fields of a line that recovery reads."""

    custom_id: str


_LINE = msgspec.json.Decoder(_Written)


class _Half:
    """One of the two files."""

    def __init__(self, path: Path, finished: CustomIds) -> None:
        self.count = 0
        self._descriptor = open_append(path)
        self._size = 0
        try:
            with path.open("rb") as lines:
                for line in lines:
                    custom_id = _custom_id(line)
                    if custom_id is None:
                        break
                    self._size += len(line)
                    self.count += finished.add(custom_id)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, line: bytes) -> None:
        try:
            write_all(self._descriptor, line)
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # no piece of a line stays in front of the next one
            raise
        self._size += len(line)
        self.count += 1

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)


class Answers:
    """The answers of one batch. Thread-safe; all calls block."""

    def __init__(self, folder: Path) -> None:
        self.finished = CustomIds()
        """Ids of requests that have an answer or an error."""
        self._lock = threading.Lock()
        self._is_open = True
        self._output = _Half(folder / "output.jsonl", self.finished)
        try:
            self._errors = _Half(folder / "errors.jsonl", self.finished)
        except BaseException:
            self._output.close()
            raise

    @property
    def num_completed(self) -> int:
        """Requests with an answer."""
        return self._output.count

    @property
    def num_failed(self) -> int:
        """Requests with an error."""
        return self._errors.count

    def append(self, custom_id: str, line: bytes, *, is_error: bool) -> None:
        """Write a request's line, unless it has one.

        Raises:
            OSError: the disk is full, or failed; the journal is as before.
        """
        with self._lock:
            if self._is_open and custom_id not in self.finished:
                (self._errors if is_error else self._output).append(line)
                self.finished.add(custom_id)

    def close(self) -> None:
        """Make all lines survive a loss of power. Nothing is appended afterwards."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._output.close()
                self._errors.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()


def _custom_id(line: bytes) -> str | None:
    """Id of a whole line; None if it is cut or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _LINE.decode(line).custom_id
    except msgspec.MsgspecError:
        return None
