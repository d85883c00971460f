"""The engine process: `python -m outrider.platform.client.process.engine_process`, started by the supervisor.

Its standard input brings the configuration and then stays open: when it ends, the API process is gone, however it went,
and this process must not stay. Interrupts from the terminal and SIGTERM are ignored here: the API process decides when
the engine stops, so that it can drain.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ...core.adapter_verbs import PendingCall
from ...core.errors import ErrorInfo, OutriderError
from ...core.logs import set_up_logging
from ...core.messages import EngineRequest, TokenDelta
from ...core.threads import leave_a_core_free
from ...core.wire import read
from ..engine_factory import Engine, load_engine
from .ipc import (
    Abort,
    Add,
    Call,
    Deltas,
    Dying,
    EngineLink,
    Message,
    ProcessConfig,
    Ready,
    Reply,
    Stop,
    Undecodable,
    decode_arguments,
    decode_config,
    encode_value,
)

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 1000
_EMPTY_STEP_POLL_MS = 1
"""Wait after a step without output (adapters are loading, or the first chunks of a long prompt): not busy."""
_READING_POLL_MS = 10
"""Wait while the files of an adapter are read and there is no other work."""


def error_info(error: BaseException) -> ErrorInfo:
    """An exception as plain data; one that is not an OutriderError with the name of its class."""
    if isinstance(error, OutriderError):
        return error.info()
    return ErrorInfo(OutriderError.type, f"{type(error).__name__}: {error}")


class EngineLoop:
    """Serve one client until it sends stop. Errors of single requests and calls are answered; an error in a step ends
    the loop."""

    def __init__(self, engine: Engine, link: EngineLink) -> None:
        self._engine = engine
        self._link = link
        self._failed: list[TokenDelta] = []
        self._stopping = False
        self._loads: deque[tuple[Call, PendingCall]] = deque()

    def run(self) -> None:
        """Handle messages and run steps until a stop message.

        Raises:
            Exception: a step failed; the engine's state is unknown.
        """
        poll_ms = 0
        while True:
            for message in self._link.receive(poll_ms if self._engine.has_work() else self._idle_ms()):
                self._handle(message)
            if self._stopping:
                return
            self._reply_to_loads()
            deltas, self._failed = self._failed, []
            if self._engine.has_work():
                deltas += self._engine.step()
            if deltas:
                self._link.send(Deltas(deltas))
            poll_ms = 0 if deltas else _EMPTY_STEP_POLL_MS

    def _idle_ms(self) -> int:
        """Longest wait for a message while there is no work."""
        if self._loads:
            return _READING_POLL_MS
        due = self._engine.learn()
        return _IDLE_POLL_MS if due is None else min(_IDLE_POLL_MS, math.ceil(1000 * due))

    def _handle(self, message: Message | Undecodable) -> None:
        if isinstance(message, Add):
            for request in message.requests:
                self._add(request)
        elif isinstance(message, Abort):
            self._engine.abort(message.request_ids)
        elif isinstance(message, Call):
            self._handle_call(message)
        elif isinstance(message, Undecodable):
            self._refuse(message)
        elif isinstance(message, Stop):
            self._stopping = True

    def _refuse(self, message: Undecodable) -> None:
        """Answer a message that cannot be decoded, so that no request waits forever."""
        logger.error("A message cannot be decoded: %s", message.error.message)
        self._failed += [TokenDelta(request_id, error=message.error) for request_id in message.request_ids]
        if message.call_id is not None:
            self._link.send(Reply(message.call_id, encode_value(None), message.error))

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add_request(request)
        except Exception as error:
            if not isinstance(error, OutriderError):
                logger.exception("Cannot add request %s", request.request_id)
            self._failed.append(TokenDelta(request.request_id, error=error_info(error)))

    def _handle_call(self, call: Call) -> None:
        try:
            arguments = decode_arguments(call)
            owner, _, verb = call.verb.rpartition(".")
            load = self._engine.adapters.start(verb, arguments) if owner else None
            function = getattr(self._engine.adapters if owner else self._engine, verb)
        except Exception as error:
            self._link.send(self._failure(call, error))
            return
        if load is None:
            self._link.send(self._reply(call, partial(function, **arguments)))
        else:
            self._loads.append((call, load))

    def _reply_to_loads(self) -> None:
        """Answer the calls whose files have been read, in their order, however many are read at once: the client lists
        adapters in the order of the answers."""
        while self._loads and self._loads[0][1].done():
            call, load = self._loads.popleft()
            self._link.send(self._reply(call, load.result))

    def _reply(self, call: Call, run: Callable[[], Any]) -> Reply:
        try:
            return Reply(call.call_id, encode_value(run()))
        except Exception as error:
            return self._failure(call, error)

    @staticmethod
    def _failure(call: Call, error: Exception) -> Reply:
        if not isinstance(error, OutriderError):
            logger.error("The call %s failed", call.verb, exc_info=error)
        return Reply(call.call_id, encode_value(None), error_info(error))


def _read_config(stdin: int) -> ProcessConfig:
    with os.fdopen(os.dup(stdin), "rb") as stream:
        return decode_config(read(stream))


def _leave_with_parent(stdin: int, parent: int, folder: str) -> None:
    """Wait until the parent is gone, then end this process whatever it is doing."""
    while True:
        # The pipe may also be held open by other children of the parent, hence the look at the parent's id.
        readable, _, _ = select.select([stdin], [], [], 1.0)
        if (readable and not os.read(stdin, 4096)) or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)  # its owner cannot do it any more
            os._exit(1)


def serve(config: ProcessConfig) -> int:
    """Start the engine and serve until a stop message; returns the exit status."""
    link = EngineLink(config.folder)
    engine: Engine | None = None
    try:
        engine = load_engine(config.engine)(config.args, progress=config.progress)
        # What is there now stays: a collection that looked at it would hold up a step for a tenth of a second.
        gc.collect()
        gc.freeze()
        link.send(Ready(engine.info))
        EngineLoop(engine, link).run()
        engine.shutdown()
        return 0
    except BaseException as error:
        if engine is not None or not isinstance(error, OutriderError):
            logger.exception("The engine %s", "failed" if engine is not None else "could not start")
        link.send(Dying(error_info(error)))
        return 1
    finally:
        link.close()


def main() -> None:
    """Entry point of the process."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Children of this process (compilers) must inherit neither the pipe nor a terminal.
    stdin = os.dup(0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    leave_a_core_free()
    config = _read_config(stdin)
    threading.Thread(target=_leave_with_parent, args=(stdin, parent, config.folder), daemon=True).start()
    sys.path[:] = config.sys_path
    set_up_logging(config.log_level, config.log_format, "engine")
    status = serve(config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # libraries may have left threads that never end


if __name__ == "__main__":
    main()
