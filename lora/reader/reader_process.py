"""The reader process: `python -m outrider.lora.reader.reader_process DESCRIPTOR`, started by `AdapterReader`.

It reads, checks, digests and packs adapters, one after another, outside the engine's process, whose threads share
Python's lock. It has no model. Adapters that need the base's weights (DoRA's gains, copies of base weights in the file)
are left to the engine's process.

The descriptor is a Unix socket. This process ends when the other end is closed or the parent is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ...kernels.native import library
from ...platform.core.errors import OutriderError
from ...platform.core.wire import receive, send
from ..adapter import AdapterSource
from ..device.dora import BaseWeight
from ..files.folder import AdapterFiles
from ..step_yield import LARGE_BYTES, CpuYielder, LongStepFlag, set_yielder, yield_to_steps
from .idle_thread import run_idle
from .reader_messages import Setup, encode_adapter, make_files

_PARENT_MS = 1000
"""Milliseconds between two checks for the parent."""
_PIECE = 1 << 17
"""Bytes written in one call."""
IDLE_SECONDS = 5.0
"""Longest time for which a large adapter is read on idle processors only, in addition to the time for its bytes."""
IDLE_BYTES_A_SECOND = 20 << 20
"""Bytes of an adapter that add one second to that time: 13 s for the 168 MiB of rank 32 of an 8B model, which take 4 to
9 s next to a step that uses two cores."""
BUSY_SECONDS = 60.0
"""Time for which large adapters are read with pauses at once, after one for which too few processors were idle."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class _BaseNeededError(OutriderError):
    """The adapter needs the base's weights. It is an OutriderError, so that no handler treats it as a broken file."""


def _no_base(*_: object) -> NoReturn:
    raise _BaseNeededError("the base model's weights are needed")


def answer(source: AdapterSource, files: AdapterFiles) -> tuple[dict[str, Any], int | None]:
    """Return the answer to one request, and the descriptor of the adapter's memory, which the caller must close."""
    try:
        adapter = files.read(source)
        if adapter.target.invocation or not all(part.is_plain for part in adapter.packed):
            return {"unable": "it has more than rank rows"}, None
        message, buffers = encode_adapter(adapter)
        return {"adapter": message}, _sealed(buffers)
    except _BaseNeededError as error:
        return {"unable": error.message}, None
    except OutriderError as error:
        info = error.info()
        return {"error": [info.type, info.message, info.param]}, None
    except Exception as error:  # such as out of memory: the engine's process may succeed, or raises the error
        return {"unable": f"{type(error).__name__}: {error}"}, None


def _sealed(buffers: list[memoryview]) -> int:
    """Make a sealed file in memory with this content. Returns its descriptor."""
    memory = os.memfd_create("outrider-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for buffer in buffers:
            while buffer.nbytes:
                buffer = buffer[os.write(memory, buffer[:_PIECE]) :]
                yield_to_steps()
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def run(connection: socket.socket) -> None:
    """Answer requests until the parent is gone."""
    send(connection, {})
    message, descriptors = receive(connection)
    setup = Setup(*message)
    yielder = _yield_processors(descriptors)
    files = make_files(setup, BaseWeight(_no_base, _no_base), _no_base)
    if setup.native:
        library()
    answering = BetweenSteps(files, yielder)
    asked = select.poll()
    asked.register(connection, select.POLLIN)
    while True:
        # Children of the parent may hold the socket open, hence the check of the parent's id.
        readable = asked.poll(_PARENT_MS)
        if os.getppid() != setup.parent:
            return
        if not readable:
            continue
        source = AdapterSource(*receive(connection)[0])
        message, memory = answering.answer(source)
        try:
            send(connection, message, memory)
        finally:
            if memory is not None:
                os.close(memory)
        yield_to_steps()


class BetweenSteps:
    """Answers requests without delaying steps much."""

    def __init__(self, files: AdapterFiles, yielder: CpuYielder) -> None:
        self._files, self._yielder = files, yielder
        self._busy_until = 0.0  # until then no processor is expected to be idle

    def answer(self, source: AdapterSource) -> tuple[dict[str, Any], int | None]:
        """Return `answer`. Adapters of `LARGE_BYTES` are read on idle processors; if these are too few, again from the
        start with pauses, as the others."""
        num_bytes = self._files.num_bytes(source)

        def work(check: Callable[[], None]) -> tuple[dict[str, Any], int | None]:
            self._yielder.begin(num_bytes, check)
            return answer(source, self._files)

        if num_bytes >= LARGE_BYTES and time.monotonic() >= self._busy_until:
            answered = run_idle(work, IDLE_SECONDS + num_bytes / IDLE_BYTES_A_SECOND, _close_memory)
            if answered is not None:
                return answered
            self._busy_until = time.monotonic() + BUSY_SECONDS
        self._yielder.begin(num_bytes)
        return answer(source, self._files)


def _close_memory(answered: tuple[dict[str, Any], int | None]) -> None:
    """Discard an answer."""
    if answered[1] is not None:
        os.close(answered[1])


def _yield_processors(descriptors: Sequence[int]) -> CpuYielder:
    """Let the engine's threads run first. `descriptors`: the engine's flag of long steps; it is closed here."""
    flags = [LongStepFlag(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    yielder = CpuYielder(*flags)
    set_yielder(yielder)
    return yielder


def main() -> None:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):  # the engine's process is gone
        run(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
