"""Memory that the system provides when it is used first, so that no start waits for it."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Tensor of zeros. On a CPU the system provides its pages at the first write, huge pages where it has any: unused
    parts take no memory, and nothing waits until gigabytes are cleared."""
    device, shape = torch.device(device), tuple(shape)
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # kept by the tensor
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def release_pages(tensor: Tensor) -> None:
    """Give the pages of a tensor of `lazy_zeros` back to the system: it holds zeros then. Does nothing on a GPU."""
    if tensor.device.type == "cpu" and tensor.nbytes and hasattr(mmap, "MADV_DONTNEED"):
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), mmap.MADV_DONTNEED)
