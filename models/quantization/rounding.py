"""Quantisation of full-precision weights while they are loaded: round to nearest, without calibration.

int8   one scale for each output: max |w| / 127
int4   codes 0 to 15 with a scale and an offset for each 128 inputs, or 32 in small models. Of a few ranges, each a part
       of that from the least to the largest weight, the one with the least squared error is taken. Kernels may round
       inputs to int8, as llama.cpp does for such weights.
fp8    float8_e4m3fn with one scale for each output: max |w| / 448

Embeddings and heads are int8 with each of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.quantized_linear import QuantizedWeight
from ..layers.linear import Linear

_GROUP, _SMALL_GROUP = 128, 32
# Hidden size below which a model is small: there int4 in groups of 128 costs too much quality. Perplexity of
# SmolLM2-135M over that of bfloat16: 1.69 in groups of 128, 1.00 in groups of 32.
_SMALL_HIDDEN = 1024
# Parts of the range of an int4 group that are tried; the one with the least square error is taken.
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)
# Weights that are rounded at once: their float32 copies take 4 MiB each.
_CHUNK = 1 << 20
# Layers of few weights, on which the choice of experts depends, or the mixture of streams.
_EXACT = (".router", ".shared_gate", ".altup_router", ".altup_prediction", ".altup_correction")


def round_int8(weight: Tensor) -> QuantizedWeight:
    """Weight [O, I] with one scale for each output."""
    return _by_rows(weight, _int8)


def round_int4(weight: Tensor, group: int = _GROUP) -> QuantizedWeight:
    """Weight [O, I] with scales and offsets of groups of inputs."""
    return _by_rows(weight, partial(_int4, group=group))


def round_fp8(weight: Tensor) -> QuantizedWeight:
    """Weight [O, I] with one scale for each output."""
    return _by_rows(weight, _fp8)


ROUNDINGS: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": round_int8, "int4": round_int4, "fp8": round_fp8}
"""Function for each value of the option `quantization` that does not name the format of a checkpoint."""


def choose_rounding(
    linear: Linear, quantization: str, hidden_size: int = _SMALL_HIDDEN
) -> Callable[[Tensor], QuantizedWeight] | None:
    """Function for a layer of a model of the hidden size; None: its weights stay as they are."""
    if linear.name.endswith(_EXACT):
        return None
    if quantization == "int4" and hidden_size < _SMALL_HIDDEN:
        return partial(round_int4, group=_SMALL_GROUP)
    return ROUNDINGS[quantization]


def _by_rows(weight: Tensor, quantise: Callable[[Tensor], QuantizedWeight]) -> QuantizedWeight:
    """Join the results for a few rows at a time, so that little more memory is needed."""
    chunks = [quantise(rows.float()) for rows in weight.split(max(1, _CHUNK // max(1, weight.shape[1])))]
    return chunks[0] if len(chunks) == 1 else QuantizedWeight.cat(chunks)


def _row_scales(rows: Tensor, largest: float) -> Tensor:
    scales = rows.abs().amax(1, keepdim=True) / largest
    return torch.where(scales > 0, scales, 1.0)


def _int8(rows: Tensor) -> QuantizedWeight:
    scales = _row_scales(rows, 127)
    return QuantizedWeight(bits=8, codes=(rows / scales).round_().to(torch.int8), scales=scales, group=rows.shape[1])


def _fp8(rows: Tensor) -> QuantizedWeight:
    scales = _row_scales(rows, 448)
    codes = (rows / scales).to(torch.float8_e4m3fn)
    return QuantizedWeight(bits=8, codes=codes, scales=scales, group=rows.shape[1])


def _int4(rows: Tensor, group: int) -> QuantizedWeight:
    outputs, inputs = rows.shape
    group = min(group, inputs)
    missing = -inputs % group
    # A shorter last group is filled up with its last input, which does not change its range.
    padded = F.pad(rows[None], (0, missing), mode="replicate")[0] if missing else rows
    values = padded.reshape(outputs, -1, group)
    low, high = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    least = torch.full_like(low, float("inf"))
    scales, offsets, codes = torch.ones_like(low), low.clone(), torch.zeros_like(values, dtype=torch.uint8)
    for part in _RANGES:
        step = (high - low) * (part / 15)
        step = torch.where(step > 0, step, 1.0)
        start = low * part
        tried = ((values - start) / step).round_().clamp_(0, 15)
        error = (tried * step + start - values).square_().sum(2, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scales, offsets = torch.where(better, step, scales), torch.where(better, start, offsets)
        codes = torch.where(better, tried.to(torch.uint8), codes)
    return QuantizedWeight(
        bits=4,
        codes=codes.view(outputs, -1)[:, :inputs].contiguous(),
        scales=scales.squeeze(2),
        group=group,
        offsets=offsets.squeeze(2),
        coarse_inputs=True,
    )
