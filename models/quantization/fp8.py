"""Weights of float8_e4m3fn: each with a scale for blocks, rows or the whole tensor.

weight float8 [O, I]; weight_scale_inv [O / 128, I / 128] of blocks, or weight_scale [], [1], [O] or [O, 1];  W = w · s
Inputs are rounded to float8 too, on devices that multiply it, if the config says so: with a scale for each token
("dynamic"), for inputs of at most fbgemm's activation_scale_ub, or with the file's input_scale ("static"). Weights in
blocks keep inputs as they are.
"""

from __future__ import annotations

import math
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
    scheme = choice(values, "activation_scheme", ("dynamic", "static", None), None)
    choice(values, "fmt", ("e4m3", None), "e4m3")
    choice(values, "quant_algo", ("FP8", None), None)
    block = block_size(values.get("weight_block_size"), "weight_block_size")
    name = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    method = values.get("quant_method")
    rounds_inputs = scheme is not None or method in ("fbgemm_fp8", "modelopt")
    is_static = scheme == "static" or (scheme is None and method == "modelopt")

    bound = _input_bound(values)

    def read(parts: Parts) -> StoredTensor:
        return describe(parts, block, rounds_inputs=rounds_inputs, is_static=is_static, input_bound=bound)

    return Format("fp8", name, PARTS, read, markers=("weight_scale_inv", "weight_scale"))


def _input_bound(values: Mapping[str, Any]) -> float:
    """Largest |x| of a token's scale (fbgemm); infinite without one."""
    value = values.get("activation_scale_ub")
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise unsupported("activation_scale_ub", value, "a positive number")
    return float(value)


def block_size(value: object, option: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None if there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in value):
        raise unsupported(option, value, "two positive integers")
    return value[0], value[1]


def describe(
    parts: Parts,
    block: tuple[int, int] | None,
    *,
    rounds_inputs: bool = False,
    is_static: bool = False,
    input_bound: float = math.inf,
) -> StoredTensor:
    """Weight with the scales that it has; see `Format`.

    Args:
        rounds_inputs: True when the config says that inputs are float8 too.
        is_static: True when their scale is in the file; one that is missing is replaced by a scale for each token.
        input_bound: Largest |x| of a token's scale.
    """
    outputs, inputs = parts.shape("weight", 2)
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    per_block: list[tuple[int, ...]] = []
    if block is not None:
        per_block = [(-(-outputs // block[0]), -(-inputs // block[1]))]
    shape = parts.check(name, *per_block, (), (1,), (outputs,), (outputs, 1))
    rounds_inputs = rounds_inputs and shape not in per_block
    is_static = rounds_inputs and is_static and "input_scale" in parts
    if is_static:
        parts.check("input_scale", (), (1,))

    def read() -> Any:
        codes = parts.read("weight", torch.float8_e4m3fn)
        if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
            raise ValueError("weight has numbers that are not finite")
        scales, group = parts.floats(name), inputs
        if block is not None and shape in per_block:
            scales, group = scales.repeat_interleave(block[0], 0)[:outputs], min(block[1], inputs)
        else:
            scales = channel_scales(scales, outputs)
        input_scale = float(parts.floats("input_scale").max()) if is_static else 0.0
        input_scale = max(0.0, input_scale)  # 0 of experts that no sample of the calibration reached: as if missing
        return QuantizedWeight(
            bits=8,
            codes=codes,
            scales=scales,
            group=group,
            float8_scale=input_scale if rounds_inputs else None,
            float8_bound=input_bound,
        )

    return StoredTensor((outputs, inputs), read)


def channel_scales(scales: Tensor, outputs: int) -> Tensor:
    """Scales [O, 1] of [], [1], [O] or [O, 1]."""
    return scales.reshape(-1, 1).expand(outputs, 1).contiguous()
