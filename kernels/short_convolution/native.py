"""Short convolution in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..native import DTYPES, INTEGER, POINTER, function
from ..state_plan import StatePlan

if TYPE_CHECKING:
    from . import Filters


@functools.cache
def _functions() -> Any:
    types = (POINTER, INTEGER, POINTER, INTEGER, *[POINTER] * 4, *[INTEGER] * 4)
    return function("outrider_short_convolution", *types)


def short_convolution(x: Tensor, filters: Filters, plan: StatePlan, states: Tensor, *, silu: bool) -> Tensor | None:
    """See `kernels.short_convolution.short_convolution`; None when the kernel does not serve x."""
    kernel = _functions()
    if kernel is None or x.dtype not in DTYPES or not x.is_cpu:
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty(x.shape)
    bias = None if filters.bias is None else filters.bias.data_ptr()
    kernel(
        *(plan.table.data_ptr(), plan.num_rows, x.data_ptr(), x.stride(0), filters.taps.data_ptr(), bias),
        *(states.data_ptr(), y.data_ptr(), x.shape[1], len(filters.taps), silu, DTYPES[x.dtype]),
    )
    return y
