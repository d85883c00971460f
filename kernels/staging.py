"""Small arrays of a step on their way to the device and back: one copy for all, which the host need not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Host arrays [n_i] of int64 or float64 as tensors on `device`, in one copy.

    Each begins at a multiple of 16 bytes, whatever the lengths before it: Triton compiles a kernel anew for pointers
    that are aligned differently. The pinned memory is the caching allocator's, which keeps it until the copy is over.
    """
    sizes = [(array.size + 1) // 2 * 2 for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    host = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        flat[start : start + array.size] = np.ascontiguousarray(array).view(np.int64)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(torch.float64 if array.dtype.kind == "f" else torch.int64)
        for array, start in zip(arrays, starts, strict=False)
    ]


def staged(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array of any type as `device` can fetch it while the host goes on."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """One host array of any type on `device`, without waiting for the copy; on a CPU it is the same memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return staged(array, device).to(device, non_blocking=True)


class Download:
    """Tensors of int64 and float32 on their way to the host, in one copy."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """`parts` are on one device, of any shapes."""
        self._shapes = [(part.shape, part.is_floating_point()) for part in parts]
        # float64 holds float32 exactly, and has int64's size.
        flat = [part.double().view(torch.int64) if part.is_floating_point() else part for part in parts]
        there = torch.cat([part.reshape(-1) for part in flat])
        self._host = torch.empty(there.shape, dtype=torch.int64, pin_memory=there.is_cuda)
        self._host.copy_(there, non_blocking=True)
        self._done = torch.cuda.current_stream(there.device).record_event() if there.is_cuda else None

    def wait(self) -> list[list[Any]]:
        """What has arrived, as nested lists; waits for it."""
        if self._done is not None:
            self._done.synchronize()
        arrived = self._host.split([shape.numel() for shape, _ in self._shapes])
        return [
            (part.view(torch.float64) if is_float else part).view(shape).tolist()
            for part, (shape, is_float) in zip(arrived, self._shapes, strict=True)
        ]
