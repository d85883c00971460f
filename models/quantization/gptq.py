"""GPTQ (Frantar et al. 2023, arXiv:2210.17323) as AutoGPTQ and GPTQModel store it.

qweight int32 [I · bits / 32, O], qzeros int32 [G, O · bits / 32], scales [G, O], g_idx [I];  W = (q - z) · s
The format "gptq" stores z - 1, "gptq_v2" z.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint.weight_files import StoredTensor
from .base import Format, Grouped, Parts, choice, group_size, num_groups, unpack_codes, unsupported


def parse(values: Mapping[str, Any]) -> Format:
    """Format that a quantization_config describes.

    Raises:
        UnsupportedModelError: an option is not served; `param` names it.
    """
    bits = choice(values, "bits", (4, 8), None)
    size = group_size(values, "group_size", -1)
    option = "checkpoint_format" if "checkpoint_format" in values else "format"  # its name in transformers 5
    stored = choice(values, option, ("gptq", "gptq_v2"), "gptq")
    choice(values, "pack_dtype", ("int32",), "int32")
    choice(values, "is_marlin_format", (False,), False)
    exceptions = values.get("dynamic") or {}
    if not isinstance(exceptions, Mapping) or not all(str(key).startswith("-:") for key in exceptions):
        raise unsupported("dynamic", exceptions, "modules that are left out (-:)")
    mask, added = (1 << bits) - 1, int(stored == "gptq")

    def describe(parts: Parts) -> StoredTensor:
        packed, outputs = parts.shape("qweight", 2)
        inputs = packed * 32 // bits
        group, groups = num_groups(inputs, size)
        parts.check("qzeros", (groups, -(-outputs * bits // 32)))
        parts.check("scales", (groups, outputs))
        if "g_idx" in parts:
            parts.check("g_idx", (inputs,))

        def read() -> Any:
            codes = unpack_codes(parts.read("qweight", torch.int32).t(), bits, inputs)
            zeros = (unpack_codes(parts.read("qzeros", torch.int32), bits, outputs) + added) & mask
            scales = parts.floats("scales").t().contiguous()
            index = parts.read("g_idx", torch.int32, torch.int64) if "g_idx" in parts else None
            return Grouped(bits, codes, scales, group, zeros.t().contiguous(), index).weight()

        return StoredTensor((outputs, inputs), read)

    parts = ("qweight", "qzeros", "scales", "g_idx")
    return Format("gptq", f"gptq {bits} bits", parts, describe, optional_bias=True)
