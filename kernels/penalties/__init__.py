"""Penalties on tokens that a sequence already has. For each row x [V] of its logits

    x[t] = x[t] / r if x[t] > 0 else x[t] * r       for every token t of its prompt or output
    x[t] = x[t] - (p + f * n[t])                    for every token that was generated n[t] > 0 times

with the repetition penalty r (Keskar et al. 2019, CTRL, section 4.1), and OpenAI's presence and frequency penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..dispatch import use_triton
from . import torch as _torch

__all__ = ["COUNT_BITS", "Penalised", "penalise"]

COUNT_BITS = _torch.COUNT_BITS


class Penalised(NamedTuple):
    """Sequence and the rows of logits that continue it."""

    places: Sequence[int]
    """Rows of the logits."""
    num_after: Sequence[int]
    """Number of tokens in `after` that precede each of the rows."""
    entries: np.ndarray
    """[E] int64, one entry for each different token: token << COUNT_BITS | times it was generated (0: only in the
    prompt)."""
    after: Sequence[Sequence[int]]
    """Tokens generated after the entries, in parts; negative: no token. They may be `DeviceIds`, for which a GPU does
    not wait."""
    repetition: float
    presence: float
    frequency: float


def penalise(logits: Tensor, sequences: Sequence[Penalised]) -> None:
    """Apply the penalties to the rows of `sequences` in `logits` [R, V] float32, which is mutated. Tokens are below V.
    On a GPU this is one copy and one launch, and the host does not wait."""
    if use_triton(logits):
        from . import triton as _triton

        _triton.penalise(logits, sequences)
    else:
        _torch.penalise(logits, sequences)
