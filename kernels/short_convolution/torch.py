"""Short convolution in PyTorch: the reference, and the path of devices without another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..state_plan import StatePlan

if TYPE_CHECKING:
    from . import Filters


def short_convolution(x: Tensor, filters: Filters, plan: StatePlan, states: Tensor, *, silu: bool) -> Tensor:
    """See `kernels.short_convolution.short_convolution`."""
    history = states.index_select(0, plan.sources)
    inputs = torch.cat((history.flatten(0, 1), x))
    slots, index = plan.conv_writes
    states[slots] = inputs[index]
    out = filters.bias
    for weight, places in zip(filters.taps, plan.taps, strict=True):
        product = inputs.index_select(0, places) * weight  # float32, as the weight
        out = product if out is None else out + product
    assert out is not None, "a kernel has taps"
    return (F.silu(out) if silu else out).to(x.dtype)
