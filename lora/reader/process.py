"""The reader process: `python -m outrider.lora.reader.process DESCRIPTOR`, started by `reader.AdapterReader`.

It reads, checks, digests and packs adapters, one after another, so that the engine's process, whose threads share
Python's lock, need not. It has no model: what needs the base's weights (DoRA's gains, copies of base weights in the
file) is left to the engine's process.

The descriptor is a Unix socket. When its other end is closed, or the parent is gone, this process must not stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ...kernels.native import library
from ...platform.core.errors import OutriderError
from ..adapter import AdapterSource
from ..device.dora import BaseWeight
from ..device.layout import ModelLayout
from ..files.folder import AdapterFiles
from ..tiers.step_signal import ProcessorTurns, StepSignal, give_way, take_turns
from .messages import Setup, encode_adapter, make_files, make_layouts, receive, send

_PARENT_MS = 1000
_PIECE = 1 << 17
"""Bytes that are written at once."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class _BaseNeededError(OutriderError):
    """Something depends on the base's weights. Ours, so that no handler on the way takes it for a broken file."""


def _no_base(*_: object) -> NoReturn:
    raise _BaseNeededError("the base model's weights are needed")


def answer(source: AdapterSource, files: AdapterFiles, layouts: list[ModelLayout]) -> tuple[dict[str, Any], int | None]:
    """The answer to one request, and the descriptor of the adapter's memory, which is the caller's to close."""
    try:
        adapter = files.read(source)
        packed = [
            layout.pack(modules)
            for layout, modules in zip(layouts, (adapter.modules, adapter.draft_modules), strict=True)
        ]
        give_way()
        message, buffers = encode_adapter(adapter, packed)
        return {"adapter": message}, _sealed(buffers)
    except _BaseNeededError as error:
        return {"unable": error.message}, None
    except OutriderError as error:
        info = error.info()
        return {"error": [info.type, info.message, info.param]}, None
    except Exception as error:  # out of memory, for one: the engine's process may fare better, and says it if not
        return {"unable": f"{type(error).__name__}: {error}"}, None


def _sealed(buffers: list[memoryview]) -> int:
    """A file in memory, with this content for ever."""
    memory = os.memfd_create("outrider-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for buffer in buffers:
            while buffer.nbytes:
                buffer = buffer[os.write(memory, buffer[:_PIECE]) :]
                give_way()
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def serve(connection: socket.socket) -> None:
    """Answer until nobody asks any more."""
    send(connection, {})
    message, signals = receive(connection)
    setup = Setup(*message)
    _stand_back(signals)
    layouts = make_layouts(setup)
    files = make_files(setup, BaseWeight(_no_base, _no_base), _no_base, layouts[0])
    if setup.native:
        library()
    asked = select.poll()
    asked.register(connection, select.POLLIN)
    while True:
        # The socket may also be held open by children of the parent, hence the look at the parent's id.
        readable = asked.poll(_PARENT_MS)
        if os.getppid() != setup.parent:
            return
        if not readable:
            continue
        source = AdapterSource(*receive(connection)[0])
        message, memory = answer(source, files, layouts)
        try:
            send(connection, message, memory)
        finally:
            if memory is not None:
                os.close(memory)
        give_way()


def _stand_back(signals: Sequence[int]) -> None:
    """Let the engine's threads go first; `signals`: the descriptor of the engine's, which is closed here."""
    found = [StepSignal(descriptor) for descriptor in signals]
    for descriptor in signals:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # no /proc
        take_turns(ProcessorTurns(*found))


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):  # the engine's process is gone
        serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
