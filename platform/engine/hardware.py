"""Hardware of the machine: the device to run on, and the memory that is free on it now."""

from __future__ import annotations

from pathlib import Path

import torch

from ..core.config import Hardware
from ..core.errors import InvalidRequestError

_MEMINFO = Path("/proc/meminfo")
# A container's limit and use, cgroup v2 and v1.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
_UNKNOWN_MEMORY = 4 << 30
_FLOAT8_CAPABILITY = (8, 9)


def find_hardware(device: str) -> Hardware:
    """The machine, and the device to use for "auto", "cpu" or "cuda".

    Raises:
        InvalidRequestError: cuda was requested and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InvalidRequestError("device cuda was requested, but no CUDA device is available", param="device")
    if device == "cuda" or (device == "auto" and has_cuda):
        free, total = torch.cuda.mem_get_info()
        has_float8 = torch.cuda.get_device_capability() >= _FLOAT8_CAPABILITY
        return Hardware(
            device="cuda",
            free_memory_bytes=free,
            total_memory_bytes=total,
            host_memory_bytes=host_memory()[1],
            has_float8=has_float8,
        )
    free, total = host_memory()
    return Hardware(device="cpu", free_memory_bytes=free, total_memory_bytes=total, host_memory_bytes=total)


def host_memory() -> tuple[int, int]:
    """(bytes available without swapping, all bytes) of this machine, or of the container if that has less."""
    free = total = _UNKNOWN_MEMORY
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for limit_file, use_file in _CGROUPS:
        limit, used = _number(limit_file), _number(use_file)
        if limit is not None and limit < total:
            free, total = min(free, max(0, limit - (used or 0))), limit
    return free, total


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
