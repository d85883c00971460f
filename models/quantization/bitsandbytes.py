"""Format of bitsandbytes: NF4 and FP4 of QLoRA (Dettmers et al. 2023, arXiv:2305.14314), LLM.int8() (arXiv:2208.07339).

4 bits  weight uint8 [n / 2, 1], the first of two codes in the upper half; weight.quant_map [16]; weight.absmax [blocks]
        float32, or with nested scales uint8, W = nested_quant_map[absmax] · nested_absmax + nested_offset;
        weight.quant_state.bitsandbytes__nf4 (or fp4): JSON as bytes
8 bits  weight int8 [O, I], SCB [O];  W = w · SCB / 127

LLM.int8() rounds all but the largest inputs; here inputs are not rounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...kernels.quantized_linear import QuantizedWeight
from ..checkpoint.weight_files import StoredTensor
from .base import Format, Parts, choice

_STATE = "weight.quant_state.bitsandbytes__"
_PARTS_4 = (
    *("weight.quant_map", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"),
    *("weight", f"{_STATE}nf4", f"{_STATE}fp4"),
)
_PARTS_8 = ("SCB", "weight", "weight_format")


def parse(values: Mapping[str, Any]) -> Format:
    """Format that a quantization_config describes.

    Raises:
        UnsupportedModelError: an option is not served; `param` names it.
    """
    in_8 = values.get("load_in_8bit", values.get("_load_in_8bit", False))
    if in_8 is True:
        return Format("bitsandbytes", "bitsandbytes int8", _PARTS_8, _eight)
    choice(values, "load_in_4bit" if "load_in_4bit" in values else "_load_in_4bit", (True,), True)
    kind = choice(values, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    choice(values, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    return Format("bitsandbytes", f"bitsandbytes {kind}", _PARTS_4, _four)


def _eight(parts: Parts) -> StoredTensor:
    outputs, inputs = parts.shape("weight", 2)
    parts.check("SCB", (outputs,), (1, outputs))

    def read() -> Any:
        if "weight_format" in parts and parts.read("weight_format", torch.uint8, torch.int64).any():
            raise ValueError("weight_format is not 0 (rows): the layout is that of one kind of GPU")
        scales = parts.floats("SCB").view(outputs, 1) / 127
        return QuantizedWeight(bits=8, codes=parts.read("weight", torch.int8), scales=scales, group=inputs)

    return StoredTensor((outputs, inputs), read)


def _four(parts: Parts) -> StoredTensor:
    state = _state(parts)
    outputs, inputs = state["shape"]
    size = state["blocksize"]
    blocks = -(-outputs * inputs // size)
    half = -(-outputs * inputs // 2)
    parts.check("weight", (half, 1), (1, half), (half,))
    parts.check("weight.absmax", (blocks,))
    parts.check("weight.quant_map", (16,))
    nested = "weight.nested_absmax" in parts
    if nested:
        parts.check("weight.nested_absmax", (-(-blocks // state["nested_blocksize"]),))
        parts.check("weight.nested_quant_map", (256,))

    def read() -> Any:
        octets = parts.read("weight", torch.uint8).flatten()
        codes = torch.stack((octets >> 4, octets & 15), -1).flatten()[: outputs * inputs]
        levels = parts.floats("weight.quant_map")
        scales = _nested(parts, state) if nested else parts.floats("weight.absmax")
        if inputs % size == 0:
            shape = outputs, inputs // size
            return QuantizedWeight(
                bits=4, codes=codes.view(outputs, inputs), scales=scales.view(shape), group=size, levels=levels
            )
        # Blocks reach from one row into the next: such a weight is used dequantised.
        return (levels[codes.long()] * scales.repeat_interleave(size)[: len(codes)]).view(outputs, inputs)

    return StoredTensor((outputs, inputs), read)


def _nested(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    """Scales of blocks, which are codes with scales of their own."""
    codes = parts.read("weight.absmax", torch.uint8).long()
    outer = parts.floats("weight.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(codes)]
    return parts.floats("weight.nested_quant_map")[codes] * outer + state["nested_offset"]


def _state(parts: Parts) -> dict[str, Any]:
    """Sizes that the file states, checked."""
    name = next((name for name in parts.names() if name.startswith(_STATE)), f"{_STATE}nf4")
    parts.shape(name, 1)
    try:
        found = json.loads(bytes(parts.read(name, torch.uint8).tolist()))
        state = {
            "shape": tuple(found["shape"]),
            "blocksize": found["blocksize"],
            "nested_blocksize": found.get("nested_blocksize", 1),
            "nested_offset": float(found.get("nested_offset", 0.0)),
        }
        numbers = (*state["shape"], state["blocksize"], state["nested_blocksize"])
        if len(state["shape"]) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in numbers):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name} is not the description of a weight of 4 bits") from error
    return state
