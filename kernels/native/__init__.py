"""The CPU kernels written in C++, built with the machine's own compiler at first use.

Sources are `kernels/<op>/native.cpp` with a plain C interface (pointers and integers) over the helpers in `simd.h`; the
wrappers beside them check shapes. Where there is no compiler, the torch paths serve.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch

from .compiler import build

__all__ = ["DTYPES", "FLOAT8", "library", "loaded"]

logger = logging.getLogger(__name__)

SWITCH = "OUTRIDER_NATIVE"
"""Environment variable: "0" keeps to the torch paths."""

# The dtypes that the kernels know, by the code that they are told.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
FLOAT8 = 2
"""The code of float8 e4m3, for the KV cache alone."""


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The kernels, or None: switched off, or not to be built here (said once, in the log).

    Calls keep Python's lock: giving it up would let other threads in between two layers. Long
    products give it up all the same (`kernels.linear.native`). The first
    call may take seconds, to compile; the result is kept in the user's cache folder.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return ctypes.PyDLL(str(build()))
    except (RuntimeError, OSError) as error:  # RuntimeError: of BuildError, and of a user without a home
        logger.warning("the native CPU kernels are not used, which costs speed: %s", error)
        return None


def loaded() -> ctypes.PyDLL | None:
    """The kernels if something has needed them before: who could do without them does not wait for the compiler."""
    return library() if library.cache_info().currsize else None
