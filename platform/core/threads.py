"""Threads of an engine process: how many compute, and how one lets others run."""

from __future__ import annotations

import os
import time


def leave_a_core_free() -> None:
    """Let this process's OpenMP use one core less than there are, unless the user has set OMP_NUM_THREADS. Call it
    before torch is imported.

    The API process and its clients need a core too. Where they share the engine's, each parallel region waits for a
    thread that is not running while the others spin: on two cores, one streamed request fell from 315 tokens/s with
    one thread to 7 with two (docs/architecture.md, Processes).
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))


def give_way() -> None:
    """For a thread that works beside another that is in a hurry: let it have Python's lock.

    A pause, as `sleep(0)` hardly ever does it: the lock is taken again before the other has woken up.
    """
    time.sleep(1e-5)
