"""Choice between Triton and PyTorch."""

from __future__ import annotations

import functools
from importlib.util import find_spec

from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """True when Triton is installed; the call does not import it."""
    return find_spec("triton") is not None


def use_triton(x: Tensor) -> bool:
    """True when an operation on `x` runs in Triton: `x` is on a CUDA device and Triton is installed."""
    return x.is_cuda and has_triton()
