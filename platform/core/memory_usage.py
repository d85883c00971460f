"""Memory of this process."""

from __future__ import annotations

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")
"""File of Linux with sizes in pages; the second one is the resident size."""


def resident_memory_bytes() -> int:
    """Resident memory of this process in bytes; 0 on systems that do not report it."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
