"""CPU kernels in C++, built with the machine's own compiler at first use.

Sources are `kernels/<op>/native.cpp` with a plain C interface (pointers and integers) over the helpers in `simd.h`; the
wrappers next to them check shapes. Without a compiler the torch paths are used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any

import torch

from .compiler import build

__all__ = ["DTYPES", "FLOAT8", "INTEGER", "POINTER", "bind", "function", "library", "loaded"]

logger = logging.getLogger(__name__)

SWITCH = "OUTRIDER_NATIVE"
"""Environment variable; "0" disables the native kernels."""

# Codes by which the kernels know the dtypes.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
FLOAT8 = 2
"""Code of float8 e4m3, which the KV cache alone uses."""
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
"""Types of the kernels' arguments; others are `ctypes`' own."""


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The loaded kernels; None when they are switched off or cannot be built here (logged once).

    Calls keep Python's lock: releasing it would let other threads run between two layers. Long products release it
    nevertheless (`kernels.linear.native`). The first call may take seconds to compile; the result is kept in the user's
    cache folder.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return ctypes.PyDLL(str(build()))
    except (RuntimeError, OSError) as error:  # RuntimeError: of BuildError, and of a user without a home
        logger.warning("the native CPU kernels are not used, which costs speed: %s", error)
        return None


def loaded() -> ctypes.PyDLL | None:
    """The kernels if an earlier call has loaded them, else None: the caller does not wait for the compiler."""
    return library() if library.cache_info().currsize else None


def function(name: str, *types: Any, result: Any = None, releases_lock: bool = False) -> Any:
    """Kernel called `name`, as `bind` makes it of the `library`; None when there are no kernels."""
    kernels = library()
    return None if kernels is None else bind(kernels, name, *types, result=result, releases_lock=releases_lock)


def bind(kernels: ctypes.CDLL, name: str, *types: Any, result: Any = None, releases_lock: bool = False) -> Any:
    """Kernel called `name` with the types of its arguments and of its result. It keeps Python's lock during a call
    unless it `releases_lock`."""
    found = getattr(ctypes.CDLL(kernels._name) if releases_lock else kernels, name)
    found.argtypes, found.restype = types, result
    return found
