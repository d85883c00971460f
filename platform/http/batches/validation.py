"""Check of a whole input file before its batch begins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

from .lines import CustomIds, Line, LineError, LineParser, numbered
from .store import Problem

MAX_LINES = 50_000
"""Requests of one batch, as in OpenAI's API."""
LINES_PER_REQUEST = 10
"""Lines of a file for each request that it may have: empty ones take time too."""
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
            for line in numbered(lines, parser.max_bytes, LINES_PER_REQUEST * max_lines):
                if stop.is_set():
                    raise StoppedError
                count += 1
                if count > max_lines:
                    message = f"The file has more than {max_lines} requests, the limit of one batch"
                    problems.append(Problem("too_many_tasks", message, line=line.number))
                    break
                problem = _check_line(line, parser, seen)
                if problem is not None:
                    problems.append(problem)
                    if len(problems) == MAX_PROBLEMS:
                        break
    except LineError as error:
        problems.append(Problem(error.code, error.message))
    except FileNotFoundError:
        problems.append(Problem("invalid_file", "The input file does not exist any more", "input_file_id"))
    if not count and not problems:
        problems.append(Problem("empty_file", "The input file has no requests", "input_file_id"))
    return Checked(count, problems)


def _check_line(line: Line, parser: LineParser, seen: CustomIds) -> Problem | None:
    """The reason why a line is no request; None if it is one."""
    try:
        if not seen.add(parser.parse(line).custom_id):
            message = "The custom_id for this request is a duplicate of another request"
            raise LineError(message, "duplicate_custom_id", "custom_id")
    except LineError as error:
        return Problem(error.code, error.message, error.param, line.number)
    return None
