"""Attention of whole prompts by torch's `scaled_dot_product_attention`, which has kernels made for each GPU.

A row is a whole prompt if no cached key comes before it: then its keys are those of the step, which lie in the
projection's output, and the cache is written but not read. Whether torch is used is decided by `prompt_trial.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .native import RowArrays, Shape
from .options import AttentionOptions, WholeRow, Window, window_size
from .torch import LayerKV


class WholePrompts(NamedTuple):
    """Long rows of a step, all of which are whole prompts."""

    calls: list[tuple[int, int, int]]
    """(first token, rows, tokens of each row) of adjacent rows of one length."""
    longest: int
    """Tokens of the longest row."""

    def serves(self, window: Window, sinks: Tensor | None, kv: LayerKV, dtype: torch.dtype) -> bool:
        """True when attention of these rows in a layer is causal and nothing else, and the cache does not round their
        keys."""
        if isinstance(window, WholeRow):
            return False
        sees_all = window is None or window_size(window) >= self.longest
        return sees_all and sinks is None and kv.k.dtype == dtype

    def attend(self, qkv: Tensor, out: Tensor, shape: Shape, scale: float | None) -> None:
        """Fill the rows' part of out [T, H · D] from qkv [T, (H + 2 Hk) · D], whose queries and keys are rotated."""
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        for first, rows, count in self.calls:
            part = slice(first, first + rows * count)
            heads = qkv[part].unflatten(0, (rows, count)).unflatten(2, (-1, shape.head_dim)).transpose(1, 2)
            q, k, v = heads.split(sizes, 1)
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=shape.num_heads != shape.num_kv_heads, scale=scale
            )
            out[part].view(rows, count, -1, shape.head_dim).copy_(y.transpose(1, 2))


def can_serve(options: AttentionOptions, dtype: torch.dtype) -> bool:
    """True for models whose whole prompts torch's fused kernels can attend to: those have no soft cap, and for float32
    there are none with grouped heads. Without a fused kernel torch would hold all scores in memory."""
    return options.soft_cap is None and not options.shared and dtype != torch.float32


def find_whole_prompts(rows: RowArrays, max_short_queries: int, first_key: int, min_tokens: int) -> WholePrompts | None:
    """The rows of more than `max_short_queries` queries; None if there are none, or one of them has cached keys or
    fewer than `min_tokens` tokens: each length is a call of its own, which many short prompts do not repay."""
    which = np.flatnonzero(rows.query_lens > max_short_queries)
    if not len(which) or (rows.starts[which] > first_key).any() or rows.query_lens[which].min() < min_tokens:
        return None
    calls: list[tuple[int, int, int]] = []
    for first, count in zip(rows.token_starts[which].tolist(), rows.query_lens[which].tolist(), strict=True):
        begin, number, length = calls[-1] if calls else (0, 0, 0)
        if length == count and begin + number * length == first:
            calls[-1] = begin, number + 1, length
        else:
            calls.append((first, 1, count))
    return WholePrompts(calls, int(rows.query_lens[which].max()))
