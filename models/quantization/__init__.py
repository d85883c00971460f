"""Quantised checkpoints: each format is read into the one form that kernels know, `QuantizedWeight`.

config.json --read_format--> Format;  its tensors --unpack--> weights, some of them packed --Linear--> kernels
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import shown, wrong
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq
from .base import FIELD, Format, unpack

__all__ = ["FORMATS", "Format", "read_format", "unpack"]

FORMATS = {
    "awq": awq.parse,
    "bitsandbytes": bitsandbytes.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fbgemm_fp8": fp8.parse,
    "fp8": fp8.parse,
    "gptq": gptq.parse,
    "modelopt": fp8.parse,
}
"""Function for each `quant_method` that makes the Format of a quantization_config."""


def read_format(values: Mapping[str, Any]) -> Format | None:
    """Format of the checkpoint with this config.json; None: its weights are not quantised.

    Raises:
        UnsupportedModelError: its method or an option is not served; `param` names it.
    """
    quantization = values.get(FIELD, values.get("compression_config"))
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise wrong(FIELD, f"must be an object, got {shown(quantization)}")
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"
    parse = FORMATS.get(str(method))
    if parse is None:
        raise wrong(f"{FIELD}.quant_method", f"({shown(method)}) is not supported; supported are {', '.join(FORMATS)}")
    return parse(quantization)
