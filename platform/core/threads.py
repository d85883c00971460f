"""Threads of an engine process: how many compute, and how one yields to others."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LARGE_WEIGHTS = 32 << 20
"""Bytes of weights from which a model's steps are long enough to use every core."""

_LATER = ThreadPoolExecutor(1, "outrider-later")
_left_free = False


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use: those of its affinity, and no more than its cgroups' quota, rounded
    up. `root` is the folder of /proc and /sys."""
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota(folder)) is not None]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, quotas)]))


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders of the groups that limit this process's time: its own and all above it. A container may not see the
    names of its own group, but sees its folder as the top one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup"
        for mount in (top / controllers, top / "cpu") if controllers else (top, top / "unified"):
            place = mount / path.lstrip("/")
            yield from (mount, *(folder for folder in (place, *place.parents) if mount in folder.parents))


def _quota(folder: Path) -> float | None:
    """Processor time, in cores, that a group may use, from files of either version of cgroups; None: all."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit = (folder / "cpu.cfs_quota_us").read_text()
        return int(limit) / int((folder / "cpu.cfs_period_us").read_text()) if int(limit) > 0 else None
    return None


def leave_a_core_free() -> None:
    """Let this process's OpenMP leave one core free, unless the user has set OMP_NUM_THREADS. Call it before torch is
    imported.

    The API process and its clients need a core too. If they share the engine's, each parallel region waits for a
    thread that is not running while the others spin: a tiny model's regions take microseconds, and such a wait takes
    milliseconds (docs/decisions/0010-two-processes-and-bounds.md).
    """
    global _left_free
    if "OMP_NUM_THREADS" not in os.environ:
        _left_free = True
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() - 1))


def threads_for(weight_bytes: int, current: int) -> int:
    """Number of threads for a model of `weight_bytes`; `current` is the present number.

    A larger model's regions are long compared with such waits, so it also takes the core that `leave_a_core_free` left.
    A number set by the user stays; the default is at most `usable_cores`, since torch ignores quotas.
    """
    if _left_free:
        return usable_cores() if weight_bytes >= LARGE_WEIGHTS else current
    return current if "OMP_NUM_THREADS" in os.environ else min(current, usable_cores())


def leaves_a_core_free() -> bool:
    """True when this process has called `leave_a_core_free` and the user has not set its threads."""
    return _left_free


def run_later(work: Callable[[], Any]) -> None:
    """Run some work in another thread, such as freeing memory, which does not need Python's lock (the GIL). It must do
    nothing when it is called again: if no thread can be started, it runs here and may run there later."""
    try:
        _LATER.submit(work)
    except RuntimeError:  # also while the interpreter is ending
        work()


def yield_lock() -> None:
    """Yield Python's lock to a more urgent thread.

    It sleeps for a moment: after `sleep(0)` this thread usually takes the lock again before the other has woken up.
    """
    time.sleep(1e-5)
