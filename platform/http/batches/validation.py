"""Check of a whole input file before its batch begins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

from .lines import CustomIds, LineError, LineParser, numbered
from .store import Problem

MAX_LINES = 50_000
"""Requests of one batch, as in OpenAI's API."""
MAX_PROBLEMS = 100
"""Wrong lines after which a file is not looked at any further."""


class Checked(NamedTuple):
    """Outcome of a check."""

    num_requests: int
    problems: list[Problem]


class StoppedError(Exception):
    """The check was stopped."""


def check_file(path: Path, parser: LineParser, stop: threading.Event, max_lines: int = MAX_LINES) -> Checked:
    """Check each line of a file; blocks. Setting `stop` ends it with a StoppedError."""
    problems: list[Problem] = []
    seen = CustomIds()
    count = 0
    try:
        with path.open("rb") as lines:
            for line in numbered(lines, parser.max_bytes):
                if stop.is_set():
                    raise StoppedError
                count += 1
                if count > max_lines:
                    message = f"The file has more than {max_lines} requests, the limit of one batch"
                    problems.append(Problem("too_many_tasks", message, line=line.number))
                    break
                try:
                    request = parser.parse(line)
                    if not seen.add(request.custom_id):
                        message = "The custom_id for this request is a duplicate of another request"
                        raise LineError(message, "duplicate_custom_id", "custom_id")
                except LineError as error:
                    problems.append(Problem(error.code, error.message, error.param, line.number))
                    if len(problems) == MAX_PROBLEMS:
                        break
    except FileNotFoundError:
        problems.append(Problem("invalid_file", "The input file does not exist any more", "input_file_id"))
        return Checked(0, problems)
    if not count:
        problems.append(Problem("empty_file", "The input file has no requests", "input_file_id"))
    return Checked(count, problems)
