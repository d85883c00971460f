"""Which tensors have Triton kernels."""

from __future__ import annotations

import functools
from importlib.util import find_spec

from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return find_spec("triton") is not None


def use_triton(x: Tensor) -> bool:
    """Whether an operation on `x` runs in Triton: on a CUDA device, if Triton is installed."""
    return x.is_cuda and has_triton()
