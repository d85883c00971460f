"""Number of threads that compute."""

from __future__ import annotations

import ctypes

import torch


def compute_alone() -> None:
    """Let the calling thread compute without helpers from now on; for threads beside the one that runs the engine.

    OpenMP gives each such thread helpers of its own, which never end. When there are more helpers than processors, all
    of them, also those of the engine's thread, stop to wait actively between two operations and must be woken for each:
    on two cores, the products of a decode step took twice the time once a loader had computed anything.
    """
    torch.get_num_threads()  # torch sets a thread's number at its first use: let that be now
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:  # else torch has no OpenMP
        set_num_threads(1)
