"""How many threads compute."""

from __future__ import annotations

import ctypes

import torch


def compute_alone() -> None:
    """From now on the calling thread computes without helpers; for threads that work beside the one that is in a hurry.

    OpenMP gives each such thread helpers of its own, which never go away. When there are more of them than processors,
    all helpers (those of the thread in a hurry, too) stop to wait actively between two operations, and have to be woken
    for each: on two cores, products of a decode step took twice the time once a loader had computed anything.
    """
    torch.get_num_threads()  # torch sets a thread's number at its first use: let that be now
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:  # else torch has no OpenMP
        set_num_threads(1)
