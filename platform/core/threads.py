"""Threads of an engine process: how many compute, and how one lets others run."""

from __future__ import annotations

import os
import time

LARGE_WEIGHTS = 32 << 20
"""Bytes of weights from which a model's steps are so long that every core should compute them."""

_left_free = False


def leave_a_core_free() -> None:
    """Let this process's OpenMP use one core less than there are, unless the user has set OMP_NUM_THREADS. Call it
    before torch is imported.

    The API process and its clients need a core too. Where they share the engine's, each parallel region waits for a
    thread that is not running while the others spin: a tiny model's regions take microseconds, and such a wait takes
    milliseconds (docs/decisions/0010-two-processes-and-bounds.md).
    """
    global _left_free
    if "OMP_NUM_THREADS" not in os.environ:
        _left_free = True
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))


def threads_for(weight_bytes: int) -> int | None:
    """Number of threads for a model of `weight_bytes`; None to leave it unchanged.

    A larger model's regions are long against such waits, so it also takes the core that `leave_a_core_free` has left.
    """
    return len(os.sched_getaffinity(0)) if _left_free and weight_bytes >= LARGE_WEIGHTS else None


def beside_a_server() -> bool:
    """True when this process has called `leave_a_core_free` and the user has not set its threads."""
    return _left_free


def give_way() -> None:
    """Let another thread that is in a hurry have Python's lock.

    A pause, as `sleep(0)` hardly ever does it: the lock is taken again before the other has woken up.
    """
    time.sleep(1e-5)
