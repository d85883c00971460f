"""Prompt lookup in token buffers on a device. For each row r with the text t, its buffer's first T tokens,

    t ++= its accepted drafts and next token of the step         (T grows by 1 + accepted[r])
    drafts[r, i] = t[s + i mod (T - s)]                          for i in [0, K)

where s is the index after the most recent earlier occurrence of the longest suffix of t, of MIN to MAX tokens, that
occurs earlier (Saxena 2023, "Prompt Lookup Decoding"). Without one s = T - 1: the last token is repeated.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import use_triton
from . import torch as _torch

__all__ = ["Rows", "TokenBuffers", "extend_and_match"]


class TokenBuffers(NamedTuple):
    """Texts of requests, on the device."""

    tokens: Tensor
    """[slots, width] int32"""
    lengths: Tensor
    """[slots] int64: tokens of each text."""


class Rows(NamedTuple):
    """Rows of a step, on the device, and what it has generated for them."""

    places: Tensor
    """[R, 3] int64: slot; T before the step, or -1 if `lengths` has it; index of the row's first token in
    `generated`."""
    generated: Tensor
    """[N] int64: for each row its accepted drafts and next token; other numbers between rows have no meaning."""
    accepted: Tensor
    """[R] int64: number of accepted drafts."""


def extend_and_match(buffers: TokenBuffers, rows: Rows, min_n: int, max_n: int, num_drafts: int) -> Tensor:
    """Append the generated tokens to the buffers, which are mutated, and return drafts [R, num_drafts] int64. Tokens
    beyond a buffer's width are dropped. On a GPU this is one launch, and the host does not wait."""
    if use_triton(buffers.tokens):
        from . import triton as _triton

        return _triton.extend_and_match(buffers, rows, min_n, max_n, num_drafts)
    return _torch.extend_and_match(buffers, rows, min_n, max_n, num_drafts)
