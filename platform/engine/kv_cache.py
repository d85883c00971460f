"""The memory behind the block table: one pair of tensors a layer, for the target's layers and the proposer's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...models.batch import LayerKV
from ...models.config import KVLayerSpec


def allocate_kv(
    layers: Sequence[KVLayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerKV]:
    """Keys and values of every layer, each [num_kv_heads, num_blocks, block_size, head_dim].

    Zero-filled: attention reads unused slots under a mask, and a NaN there would survive the mask.
    """
    return [
        LayerKV(
            *(
                torch.zeros(spec.num_kv_heads, num_blocks, block_size, spec.head_dim, dtype=dtype, device=device)
                for _ in "kv"
            )
        )
        for spec in layers
    ]
