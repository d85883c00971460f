"""Attention of ragged rows over a paged KV cache.

    softmax(q Kᵀ / sqrt(D) + mask) V

With `AttentionOptions` the scores have another factor, or a soft cap. Sinks (gpt-oss) are one number for each query
head, the score of a key without a value, which every query sees.

A query sees only positions up to its own, and within its window or its chunk. In a layer with `WholeRow` the queries of
a row see each other: all positions up to the row's end.

The cache of a layer is two tensors [Hk, num_blocks, block_size, D]: a selection of whole blocks in dimension 1 leaves
each head's keys contiguous, as the products need them. The cache has the model's dtype or, for half of the memory,
float8 e4m3, which holds the numbers as they come: those larger than 448 are cut off. If keys are the values too
(`AttentionOptions.shared`) both are one tensor, and a projection's output ends with the keys.
"""

from .native import NativeStep, RowArrays, Shape, is_native
from .options import DEFAULT_OPTIONS, AttentionOptions, Chunks, WholeRow, Window, first_seen, window_size
from .torch import (
    CACHE_FLOAT8,
    LayerKV,
    LongRow,
    QueryTile,
    ShortGroup,
    Workspace,
    attend_long,
    attend_short,
    soft_cap,
    write_kv,
)

__all__ = [
    "CACHE_FLOAT8",
    "DEFAULT_OPTIONS",
    "AttentionOptions",
    "Chunks",
    "LayerKV",
    "LongRow",
    "NativeStep",
    "QueryTile",
    "RowArrays",
    "Shape",
    "ShortGroup",
    "WholeRow",
    "Window",
    "Workspace",
    "attend_long",
    "attend_short",
    "first_seen",
    "is_native",
    "soft_cap",
    "window_size",
    "write_kv",
]
