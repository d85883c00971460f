"""Recurrence of Mamba-2 in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, float32

from ..native import DTYPES, INTEGER, POINTER, function
from ..state_plan import StatePlan

if TYPE_CHECKING:
    from . import MixerWeights, Projected

RELEASING_WORK = 1 << 26
"""Elements of states times tokens from which a call releases Python's lock: a few milliseconds."""


class _Strided(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Strided) for name in ("mixed", "gate", "step")),
        *((name, ctypes.c_void_p) for name in ("rate", "step_bias", "skip", "scale", "memory", "results", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "head_dim", "groups", "state_dim", "norm", "dtype")),
        *((name, ctypes.c_float) for name in ("least", "most", "eps")),
    )


@functools.cache
def _functions() -> Any:
    name, types = "outrider_mamba2", (POINTER, POINTER, INTEGER)
    kernel = function(name, *types)
    return None if kernel is None else (kernel, function(name, *types, releases_lock=True))


def mamba2(inputs: Projected, weights: MixerWeights, plan: StatePlan, states: Tensor) -> Tensor | None:
    """See `kernels.mamba2.mamba2`; None when the kernel does not serve the inputs."""
    kernels = _functions()
    dtype = inputs.mixed.dtype
    if kernels is None or dtype not in DTYPES or not states.is_cpu:
        return None
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in inputs]
    _, heads, state_dim, head_dim = states.shape
    results = states.new_empty((plan.num_tokens, heads * head_dim))
    out = results if dtype == float32 else states.new_empty(results.shape, dtype=dtype)
    norm = weights.norm
    kind = 0 if norm is None else 2 if norm.is_before_gate else 1
    call = _Call(
        *(_Strided(part.data_ptr(), part.stride(0)) for part in parts),
        *(vector.data_ptr() for vector in (weights.rate, weights.step_bias, weights.skip)),
        None if norm is None else norm.scale.data_ptr(),
        *(states.data_ptr(), results.data_ptr(), out.data_ptr()),
        *(heads, head_dim, weights.groups, state_dim, kind, DTYPES[dtype]),
        *(*weights.limits, 0.0 if norm is None else norm.eps),
    )
    releases = plan.num_tokens * states[0].numel() >= RELEASING_WORK
    kernels[releases](ctypes.addressof(call), plan.table.data_ptr(), plan.num_rows)
    return out
