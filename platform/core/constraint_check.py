"""Check of constraints in a process of its own, which a constraint that takes too long or too much memory ends.

The package `llguidance` bounds most of its work, but not all of it: there are patterns of fifty characters that it
would work on for hours. What has been checked here costs an engine as little as it cost here.
"""

from __future__ import annotations

import json
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
from typing import Any

from .errors import InvalidRequestError, OutriderError
from .structured_outputs import StructuredOutputsParams, grammar_package, on_deep_stack, parser_limits

CPU_SECONDS = 1.5
"""Most time for a constraint. A schema of 65,536 characters takes 0.5 s."""
_MEMORY = 2 << 30
_PATIENCE = 20.0
"""Seconds on the clock, for a machine that is busy with other things."""
_MAX_KEPT = 256
_TOO_COMPLEX = f"too complex; it takes more than {CPU_SECONDS} s or 2 GiB to compile"
_ENDED_BY_LIMITS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
"""Exit statuses of a process that had no more time, or no more memory."""


class ConstraintChecker:
    """The process, started for the first constraint, and what it has found out. Callable from any thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[Any, str] = OrderedDict()  # problem, or ""
        self._begin()
        # A process that was forked has another one: two would read each other's answers.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.thread = ThreadPoolExecutor(1, "check-constraint")
        """Thread for constraints that are not known: in a pool with other work they would keep all its threads."""
        self._asking = threading.Lock()  # guards the process, and is held while it works
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # guards what has been found out

    def knows(self, params: StructuredOutputsParams) -> bool:
        """True when a check takes no time."""
        return self._known(params) is not None

    def check(self, params: StructuredOutputsParams) -> None:
        """Check a constraint, up to 1.5 s of a processor.

        Raises:
            InvalidRequestError: it cannot be served; the message names the keyword or the place.
            OutriderError: the process has ended, or gave no answer in 20 s on a busy machine.
        """
        grammar_package()
        problem = self._known(params)
        if problem is None:
            with self._asking:
                problem = self._known(params)  # another thread may have asked meanwhile
                if problem is None:
                    problem = self._ask(params) or ""
                    self._keep(params, problem)
        if problem:
            raise InvalidRequestError(problem, param=params.source)

    def _known(self, params: StructuredOutputsParams) -> str | None:
        with self._lock:
            return self._found.get((params.source, params.key))

    def _keep(self, params: StructuredOutputsParams, problem: str) -> None:
        with self._lock:
            self._found[params.source, params.key] = problem
            if len(self._found) > _MAX_KEPT:
                self._found.popitem(last=False)

    def _ask(self, params: StructuredOutputsParams) -> str | None:
        is_new = self._process is None or self._process.poll() is not None
        if is_new:
            command = [sys.executable, "-P", "-m", __name__]
            pipe = subprocess.PIPE
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True
            )
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(_PATIENCE, process.kill)
        watch.start()
        answer = ""
        try:
            process.stdin.write(json.dumps(asdict(params)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            watch.cancel()
            if not answer:  # after KeyboardInterrupt, too: the next constraint must not get this one's answer
                self._end()
        if answer.endswith("\n"):  # else the process was ended, maybe while it wrote
            problem: str | None = json.loads(answer)
            return problem
        if process.returncode in _ENDED_BY_LIMITS:
            return f"{params.source}: {_TOO_COMPLEX}"
        if not is_new:  # it may have been killed before this constraint
            return self._ask(params)
        # Not remembered: it says nothing about the constraint.
        raise OutriderError(f"the process that checks constraints ended with status {process.returncode}; try again")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


CHECKER = ConstraintChecker()


def _problem(params: StructuredOutputsParams) -> str | None:
    """Error of a constraint, in words; None when it can be used."""
    package = grammar_package()
    try:
        text = params.grammar_text()
        is_wrong, messages = on_deep_stack(
            lambda: package.LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits()), source=params.source
        )
        if is_wrong:
            return f"{params.source}: {'; '.join(messages)[:500]}"
        # With a vocabulary of bytes it takes as long as with any other one. A token's number stands for no text.
        numbered = re.sub(r"<\[[^]]*\]>", "<[1]>", text)
        bytewise = package.LLTokenizer("byte")
        on_deep_stack(
            lambda: package.LLMatcher(bytewise, numbered, log_level=0, limits=parser_limits()), source=params.source
        )
    except InvalidRequestError as error:
        return str(error)
    return None


def main() -> None:
    """Answer each constraint, a line of JSON, with its problem or null."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        print(json.dumps(_problem(StructuredOutputsParams(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
