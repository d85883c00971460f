"""Errors of allocations, which have many types."""

from __future__ import annotations

import errno

import torch

_TEXTS = ("can't allocate memory", "out of memory", "Cannot allocate memory")
"""Parts of the messages of torch's RuntimeErrors when there is no memory; a CPU's allocator has no type of its own."""


def is_out_of_memory(error: Exception) -> bool:
    """True for an out-of-memory error of the host or a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(error) for text in _TEXTS)
