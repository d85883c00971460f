"""Weights of float8_e4m3fn: each with a scale for blocks, rows or the whole tensor.

weight float8 [O, I]; weight_scale_inv [O / 128, I / 128] of blocks, or weight_scale [], [1], [O] or [O, 1];  W = w · s
Activations are not rounded: scales that files have for them are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...kernels.quantized_linear import QuantizedWeight
from ..checkpoint.weight_files import StoredTensor
from .base import Format, Parts, choice, unsupported

PARTS = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "input_scale_ub")
# Bits of a float8_e4m3fn that is not a number, without the sign.
_NAN = 0x7F


def parse(values: Mapping[str, Any]) -> Format:
    """Format that a quantization_config describes.

    Raises:
        UnsupportedModelError: an option is not served; `param` names it.
    """
    choice(values, "activation_scheme", ("dynamic", "static", None), "dynamic")
    choice(values, "fmt", ("e4m3", None), "e4m3")
    choice(values, "quant_algo", ("FP8", None), None)
    block = block_size(values.get("weight_block_size"), "weight_block_size")
    name = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Format(
        "fp8", name, PARTS, lambda parts: describe(parts, block), markers=("weight_scale_inv", "weight_scale")
    )


def block_size(value: object, option: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None where there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in value):
        raise unsupported(option, value, "two positive integers")
    return value[0], value[1]


def describe(parts: Parts, block: tuple[int, int] | None) -> StoredTensor:
    """Weight with the scales that it has; see `Format`."""
    outputs, inputs = parts.shape("weight", 2)
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    per_block: list[tuple[int, ...]] = []
    if block is not None:
        per_block = [(-(-outputs // block[0]), -(-inputs // block[1]))]
    shape = parts.check(name, *per_block, (), (1,), (outputs,), (outputs, 1))

    def read() -> Any:
        codes = parts.read("weight", torch.float8_e4m3fn)
        if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
            raise ValueError("weight has numbers that are not finite")
        scales, group = parts.floats(name), inputs
        if block is not None and shape in per_block:
            scales, group = scales.repeat_interleave(block[0], 0)[:outputs], min(block[1], inputs)
        else:
            scales = channel_scales(scales, outputs)
        return QuantizedWeight(bits=8, codes=codes, scales=scales, group=group)

    return StoredTensor((outputs, inputs), read)


def channel_scales(scales: Tensor, outputs: int) -> Tensor:
    """Scales [O, 1] of [], [1], [O] or [O, 1]."""
    return scales.reshape(-1, 1).expand(outputs, 1).contiguous()
