"""POSIX shared memory, through which a process of the same machine hands over an adapter."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Any

from ....core.errors import AdapterError
from ....core.sampling_params import quote_for_error
from .resolver import valid_folder_name

SHARED_MEMORY = "/dev/shm"
_PIECE = 1 << 20
"""Bytes that are copied at once."""


def read_shared_memory(name: str, expect: Callable[[int], Any], write: Callable[[memoryview], Any], most: int) -> None:
    """Copy a POSIX shared memory object, such as one of Python's `multiprocessing.shared_memory`.

    Args:
        name: Its name, with or without the slash that POSIX puts before it.
        expect: Gets its size, first.
        write: Gets the pieces.
        most: Largest size.

    Raises:
        AdapterError: there is none, it is no regular file, too large, or changes its size while it is read.
    """
    plain = name.removeprefix("/")
    if not valid_folder_name(plain):
        raise AdapterError("lora_shm must be the name of a shared memory object, without a path", param="lora_shm")

    def error(problem: str) -> AdapterError:
        return AdapterError(f"lora_shm: {quote_for_error(plain)} {problem}", param="lora_shm")

    try:
        descriptor = os.open(f"{SHARED_MEMORY}/{plain}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failed:
        raise error(f"cannot be opened: {failed.strerror}") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error("is no shared memory object")
        if status.st_size > most:
            raise error(f"has {status.st_size} bytes; at most {most} are read (--max-lora-bytes)")
        expect(status.st_size)
        left, buffer = status.st_size, memoryview(bytearray(min(_PIECE, status.st_size)))
        while left and (count := os.preadv(descriptor, [buffer[: min(left, _PIECE)]], status.st_size - left)):
            write(buffer[:count])
            left -= count
        if left or os.fstat(descriptor).st_size != status.st_size:
            raise error("changed its size while it was read")
