"""Gated delta rule in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..native import DTYPES, INTEGER, POINTER, function
from ..state_plan import StatePlan

if TYPE_CHECKING:
    from . import DeltaWeights, Projected

RELEASING_WORK = 1 << 26
"""Elements of states times tokens from which a call releases Python's lock: a few milliseconds."""


_SIZES = "key_heads", "value_heads", "key_dim", "value_dim", "dtype", "by_element", "sigmoid_gate"


class _Strided(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Strided) for name in ("mixed", "gate", "beta", "decay")),
        *((name, ctypes.c_void_p) for name in ("rate", "rate_bias", "scale", "memory", "out")),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("root", "beta_scale")),
    )


@functools.cache
def _functions() -> Any:
    name, types = "outrider_delta_net", (POINTER, POINTER, INTEGER)
    kernel = function(name, *types)
    return None if kernel is None else (kernel, function(name, *types, releases_lock=True))


def delta_net(inputs: Projected, weights: DeltaWeights, plan: StatePlan, states: Tensor) -> Tensor | None:
    """See `kernels.delta_net.delta_net`; None when the kernel does not serve the inputs."""
    kernels = _functions()
    dtype = inputs.mixed.dtype
    if kernels is None or dtype not in DTYPES or not states.is_cpu:
        return None
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in inputs]
    _, heads, key_dim, value_dim = states.shape
    out = states.new_empty((plan.num_tokens, heads * value_dim), dtype=dtype)
    call = _Call(
        *(_Strided(part.data_ptr(), part.stride(0)) for part in parts),
        *(tensor.data_ptr() for tensor in (weights.rate, weights.rate_bias, weights.norm.scale, states, out)),
        *(weights.key_heads, heads, key_dim, value_dim, DTYPES[dtype], weights.by_element, weights.sigmoid_gate),
        *(weights.norm.root_value, weights.beta_scale),
    )
    releases = plan.num_tokens * states[0].numel() >= RELEASING_WORK
    kernels[releases](ctypes.addressof(call), plan.table.data_ptr(), plan.num_rows)
    return out
