"""AWQ (Lin et al. 2024, arXiv:2306.00978) as AutoAWQ stores it in its version "gemm".

qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales [G, O];  W = (q - z) · s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.weight_files import StoredTensor
from .base import Format, Grouped, Parts, choice, group_size, num_groups, unpack_codes

# Place in an int32 of each of the eight outputs that share it.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def parse(values: Mapping[str, Any]) -> Format:
    """Format that a quantization_config describes.

    Raises:
        UnsupportedModelError: an option is not served; `param` names it.
    """
    choice(values, "bits" if "bits" in values else "w_bit", (4,), 4)
    option = "version" if "version" in values else "format"  # its name in transformers 5
    choice({option: str(values.get(option, "gemm")).lower()}, option, ("gemm",), "gemm")
    choice(values, "zero_point", (True,), True)
    size = group_size(values, "group_size" if "group_size" in values else "q_group_size", 128)

    def describe(parts: Parts) -> StoredTensor:
        inputs, packed = parts.shape("qweight", 2)
        outputs = packed * 8
        group, groups = num_groups(inputs, size)
        parts.check("qzeros", (groups, packed))
        parts.check("scales", (groups, outputs))

        def read() -> Any:
            codes, zeros = (_unpack(parts.read(name, torch.int32)) for name in ("qweight", "qzeros"))
            return Grouped(4, codes, parts.floats("scales").t().contiguous(), group, zeros).weight()

        return StoredTensor((outputs, inputs), read)

    return Format("awq", "awq 4 bits", ("qweight", "qzeros", "scales"), describe)


def _unpack(packed: Tensor) -> Tensor:
    """Codes [O, n] of int32 [n, O / 8]."""
    rows, outputs = packed.shape[0], packed.shape[1] * 8
    codes = unpack_codes(packed, 4, outputs).view(rows, -1, 8)[..., list(_PLACES)]
    return codes.reshape(rows, outputs).t().contiguous()
