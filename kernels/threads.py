"""Number of threads that compute, and how they wait for each other."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from .native import INTEGER, function


def compute_alone() -> None:
    """Let the calling thread compute without helpers from now on; for threads other than the one that runs the engine.

    OpenMP gives each such thread helpers of its own, which never end. When there are more helpers than processors, all
    of them, also those of the engine's thread, stop waiting actively between two operations and must be woken for each:
    on two cores, the products of a decode step took twice the time once a loader had computed anything.
    """
    torch.get_num_threads()  # torch sets a thread's number at its first use: let that be now
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:  # else torch has no OpenMP
        set_num_threads(1)


def use_pool(yes: bool) -> None:
    """Let the native kernels of this process share work among threads of a pool of their own, or among OpenMP's.

    The pool waits only for threads that run, so other busy processes cost only their share of the processors; in
    OpenMP's regions every thread waits for all others (kernels/native/team.h). It suits engines whose products are
    native. For those of oneDNN the kernels between them must use the threads that it uses. The head, and adapters' own
    heads, do not count: they are one region of a step. With oneDNN's head on native layers SmolLM2-135M (4 requests,
    two cores of an AMD EPYC) decodes in 0.99 to 1.04 of the time of OpenMP's threads, and alongside 4 busy processes at
    least 2.3 times as fast.
    """
    choose = function("outrider_use_pool", INTEGER)
    if choose is not None:
        choose(yes)
        if yes and torch.get_num_threads() > 1:
            _let_openmp_sleep()


@functools.cache
def _let_openmp_sleep() -> None:
    """Let OpenMP's idle helpers sleep, for the life of the process.

    libgomp's wait actively for milliseconds after each operation, on the processors that the pool wants, unless the
    process has more of them than there are processors. A second team, which sleeps forever, makes it so.
    """
    made = threading.Event()

    def hold_team() -> None:
        torch.zeros(1 << 20).exp_()
        made.set()
        threading.Event().wait()

    threading.Thread(target=hold_team, name="outrider-openmp", daemon=True).start()
    made.wait()
