"""Deadline of Python code that others wrote, such as a chat template's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


class DeadlineError(BaseException):
    """Error of a block that took too long. Code in the block that catches every Exception does not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError in this block, between two of its bytecodes, when it has not ended after `seconds`.

    A single call of C code, such as the product of a string, is not interrupted.
    """
    thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def expire() -> None:
        with lock:
            if not over.is_set():
                _raise_in(thread, DeadlineError)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        # A timer that has just gone off raises before the lock is taken or after it is given back, still in here.
        with lock:
            over.set()
        timer.cancel()
