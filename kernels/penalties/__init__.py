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
    """A sequence and the rows of logits that continue it."""

    places: Sequence[int]
    """Its rows of the logits."""
    num_after: Sequence[int]
    """Of each row, how many of `after` come before it."""
    entries: np.ndarray
    """[E] int64, of each different token: token << COUNT_BITS | how often it was generated (0: it is in the prompt)."""
    after: Sequence[Sequence[int]]
    """Tokens generated after those, in some parts; negative: none. On a GPU nobody waits for `DeviceIds` among them."""
    repetition: float
    presence: float
    frequency: float


def penalise(logits: Tensor, sequences: Sequence[Penalised]) -> None:
    """Change `logits` [R, V] float32 in place, the rows of `sequences` alone. Tokens are below V. On a GPU one launch,
    after one copy, and the host waits for nothing."""
    if use_triton(logits):
        from . import triton as _triton

        _triton.penalise(logits, sequences)
    else:
        _torch.penalise(logits, sequences)
