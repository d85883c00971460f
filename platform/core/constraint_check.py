"""Check of constraints in a separate process, which is killed if a constraint takes too much time or memory.

The package `llguidance` bounds most of its work, but not all of it: some patterns of fifty characters would take it
hours. A constraint that passed here costs an engine no more than it did here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

from .errors import ConstraintCheckError, InvalidRequestError
from .structured_outputs import StructuredOutputsParams, grammar_package, on_deep_stack, parser_limits
from .wire import pack, read

logger = logging.getLogger(__name__)

CPU_SECONDS = 1.5
"""Maximum processor time for a constraint. A schema of 65,536 characters takes 0.5 s."""
_MEMORY = 2 << 30
_PATIENCE = 20.0
"""Wall-clock seconds, for a busy machine."""
_MAX_KEPT = 256
_TOO_COMPLEX = f"too complex; it takes more than {CPU_SECONDS} s or 2 GiB to compile"
_ENDED_BY_LIMITS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
"""Exit statuses of a process that had no more time, or no more memory."""


class Finding(NamedTuple):
    """Result of the check of a constraint."""

    problem: str
    """Why it cannot be served; "" if it can."""
    ignored: list[str] = []  # noqa: RUF012 (never changed)
    """Paths of keywords that are not enforced; see `StructuredOutputsParams.compile`."""


class ConstraintChecker:
    """The process, started for the first constraint, and its findings. Callable from any thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[Any, Finding] = OrderedDict()
        self._begin()
        # A forked process gets its own: two would read each other's answers.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.thread = ThreadPoolExecutor(1, "check-constraint")
        """Thread for new constraints: in a shared pool they could occupy all threads."""
        self._asking = threading.Lock()  # guards the process, and is held while it works
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # guards the findings

    def knows(self, params: StructuredOutputsParams) -> bool:
        """True when a check takes no time."""
        return self._known(params) is not None

    def check(self, params: StructuredOutputsParams) -> list[str]:
        """Check a constraint, for up to 1.5 s of processor time, and return the paths of keywords that are not
        enforced.

        Raises:
            InvalidRequestError: it cannot be served; the message names the keyword or its path.
            ConstraintCheckError: the process has ended, or gave no answer in 20 s on a busy machine.
        """
        grammar_package()
        found = self._known(params)
        if found is None:
            with self._asking:
                found = self._known(params)  # another thread may have asked meanwhile
                if found is None:
                    found = self._ask(params)
                    self._keep(params, found)
                    if found.ignored:
                        logger.info("keywords that are not enforced: %s", ", ".join(found.ignored)[:500])
        if found.problem:
            raise InvalidRequestError(found.problem, param=params.source)
        return found.ignored

    def _known(self, params: StructuredOutputsParams) -> Finding | None:
        with self._lock:
            key = params.source, params.ignored, params.key
            if key in self._found:
                self._found.move_to_end(key)  # a check that follows at once finds it again
            return self._found.get(key)

    def _keep(self, params: StructuredOutputsParams, found: Finding) -> None:
        with self._lock:
            self._found[params.source, params.ignored, params.key] = found
            if len(self._found) > _MAX_KEPT:
                self._found.popitem(last=False)

    def _ask(self, params: StructuredOutputsParams) -> Finding:
        is_new = self._process is None or self._process.poll() is not None
        if is_new:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(_PATIENCE, process.kill)
        watch.start()
        answer = b""
        try:
            process.stdin.write(pack(json.dumps(asdict(params)).encode()))
            process.stdin.flush()
            answer = read(process.stdout)
        except (OSError, EOFError):  # the process was ended, maybe while it wrote
            pass
        finally:
            watch.cancel()
            if not answer:  # after KeyboardInterrupt, too: the next constraint must not get this one's answer
                self._end()
        if answer:
            return Finding(*json.loads(answer))
        if process.returncode in _ENDED_BY_LIMITS:
            return Finding(f"{params.source}: {_TOO_COMPLEX}")
        if not is_new:  # it may have been killed before this constraint
            return self._ask(params)
        # Not cached: it is not a property of the constraint.
        raise ConstraintCheckError(
            f"{params.source}: the process that checks constraints ended with status {process.returncode}; try again"
        )

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        except OSError as error:  # out of processes or memory
            raise ConstraintCheckError(f"the process that checks constraints cannot start: {error.strerror}") from error

    def interrupt(self) -> None:
        """Kill the process without waiting for the constraint that it checks. Its check ends with an error, or is done
        again by a new process."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next constraint starts another one."""
        with self._asking:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


CHECKER = ConstraintChecker()


def _finding(params: StructuredOutputsParams) -> Finding:
    package = grammar_package()
    try:
        text, ignored = params.compile()
        is_wrong, messages = on_deep_stack(
            lambda: package.LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits()), source=params.source
        )
        if is_wrong:
            return Finding(f"{params.source}: {_in_own_words('; '.join(messages))[:500]}")
        # With a vocabulary of bytes it takes as long as with any other.
        numbered = re.sub(r"<\[[^]]*\]>", "<[1]>", text)
        bytewise = package.LLTokenizer("byte")
        on_deep_stack(
            lambda: package.LLMatcher(bytewise, numbered, log_level=0, limits=parser_limits()), source=params.source
        )
    except InvalidRequestError as error:
        return Finding(_in_own_words(str(error)))
    return Finding("", ignored)


def _in_own_words(problem: str) -> str:
    """An error of `llguidance` without the names of its options, which no request has."""
    for theirs, ours in _OWN_WORDS.items():
        problem = re.sub(theirs, ours, problem)
    return problem


_OWN_WORDS = {
    r"oneOf constraints are not supported\. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is served if its branches exclude each other by their types, by const or enum, or by a property with "
        "const or enum in each of them; use anyOf"
    ),
    r"regex parse error:\s*(.{0,100})(?s:.*)\nerror: ": r"the pattern \1 cannot be read: ",
    r"; either increase limits\.\w+ or disable limits\.\w+": "; the grammar is too complex",
    r"Unable to determine if regex is empty:(?s:.*)": (
        "pattern, format, minLength and maxLength of a string are too complex together; leave one of them out"
    ),
}


def main() -> None:
    """Answer each constraint with its `Finding`, in JSON."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))
    with contextlib.suppress(EOFError):
        while True:
            content = read(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
            finding = _finding(StructuredOutputsParams(**json.loads(content)))
            sys.stdout.buffer.write(pack(json.dumps(finding).encode()))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
