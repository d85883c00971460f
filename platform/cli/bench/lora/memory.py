"""Resident memory of this process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_mib() -> dict[str, float]:
    """Resident memory now, and its peak since the last `reset_peak`; without /proc only the peak of the process."""
    if not _STATUS.exists():
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak": round(most / 2**20 if sys.platform == "darwin" else most / 2**10, 1)}
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    found = {"resident": fields.get("VmRSS"), "peak": fields.get("VmHWM")}
    return {name: round(int(value.split()[0]) / 2**10, 1) for name, value in found.items() if value is not None}


def reset_peak() -> None:
    """Reset the peak, where the system allows it."""
    with contextlib.suppress(OSError):
        _RESET.write_text("5")
