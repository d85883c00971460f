"""Copies of a step's small arrays to the device and back: one copy for all, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Copy host arrays [n_i] of int64 or float64 to `device` in one copy; return a tensor for each.

    Each tensor begins at a multiple of 16 bytes: Triton recompiles a kernel for pointers with another alignment. The
    pinned memory is the caching allocator's, which keeps it until the copy is over.
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
    """Host tensor of an array of any dtype, in memory from which `device` can copy asynchronously."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy one host array of any dtype to `device` without waiting; on a CPU the tensor shares the array's memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return staged(array, device).to(device, non_blocking=True)


class Download:
    """Copy of int64 and float32 tensors to the host, all in one."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Start the copy of `parts`, which are on one device and of any shapes."""
        self._shapes = [(part.shape, part.is_floating_point()) for part in parts]
        # float64 holds float32 exactly, and has int64's size.
        flat = [part.double().view(torch.int64) if part.is_floating_point() else part for part in parts]
        there = torch.cat([part.reshape(-1) for part in flat])
        self._host = torch.empty(there.shape, dtype=torch.int64, pin_memory=there.is_cuda)
        self._host.copy_(there, non_blocking=True)
        self._done = torch.cuda.current_stream(there.device).record_event() if there.is_cuda else None

    def wait(self) -> list[list[Any]]:
        """Wait for the copy; return the tensors as nested lists."""
        if self._done is not None:
            self._done.synchronize()
        arrived = self._host.split([shape.numel() for shape, _ in self._shapes])
        return [
            (part.view(torch.float64) if is_float else part).view(shape).tolist()
            for part, (shape, is_float) in zip(arrived, self._shapes, strict=True)
        ]
