"""Dtype of the matrix products of a run: bfloat16, unless the processor computes them faster in float32.

Without AMX, bfloat16 products of whole batches may be slower than those in float32: on an Intel Xeon with AVX512-BF16
a core computed 83 GFLOP/s in bfloat16 and 150 in float32.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SHAPE = (512, 1024, 1024)
"""Rows, inputs and outputs of the product that is tried."""
_ROUNDS = 5
"""Rounds of a trial, of which the shortest counts."""
_GAIN = 0.9
"""Share of float32's time below which bfloat16 is used."""


def product_dtype(wanted: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype in which products of a run in `wanted` are computed on a device."""
    if wanted != torch.bfloat16 or device.type != "cpu":
        return wanted
    times = [_seconds(dtype) for dtype in (torch.bfloat16, torch.float32)]
    return torch.bfloat16 if times[0] < _GAIN * times[1] else torch.float32


@torch.inference_mode()
def _seconds(dtype: torch.dtype) -> float:
    rows, inputs, outputs = _SHAPE
    x, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    taken = []
    for _ in range(_ROUNDS):
        start = time.thread_time()  # other processes do not count
        F.linear(x, weight)
        taken.append(time.thread_time() - start)
    return min(taken)


def compute_in_float32(model: nn.Module) -> None:
    """Let a model with weights in bfloat16 compute in float32, with the same weights.

    Those of linear layers are converted for each product: this takes about 1% of the time, and half of the memory.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__dict__["forward"] = functools.partial(_linear, module)
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


def _linear(module: Any, x: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.float()
    return F.linear(x.float(), module.weight.float(), bias)
