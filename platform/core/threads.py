"""How the engine's threads wait for each other."""

from __future__ import annotations

import os


def let_idle_threads_sleep() -> None:
    """Make OpenMP's idle threads sleep instead of spin, unless the user has chosen. Call it before torch is imported.

    An engine shares its cores with its API process and its clients. A spinning thread uses up its time slice while the
    one that it waits for is not running: with one other busy process on two cores, decoding was 60 times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
