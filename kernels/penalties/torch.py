"""CPU path: one gather and one scatter for all rows. The host waits for tokens that are only on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..staging import to_device

if TYPE_CHECKING:
    from . import Penalised

COUNT_BITS = 32
_COUNT = (1 << COUNT_BITS) - 1


def penalise(logits: Tensor, sequences: Sequence[Penalised]) -> None:
    """`penalties.penalise` on any device."""
    width = logits.shape[1]
    where, factors, amounts = [], [], []
    for sequence in sequences:
        after = [token for part in sequence.after for token in part]
        tokens, counts = sequence.entries >> COUNT_BITS, sequence.entries & _COUNT
        presence, frequency = np.float32(sequence.presence), np.float32(sequence.frequency)
        num_counted = 0
        for place, num_after in sorted(zip(sequence.places, sequence.num_after, strict=True), key=lambda row: row[1]):
            for token in after[num_counted:num_after]:
                if token >= 0:
                    tokens, counts = _counted(tokens, counts, token)
            num_counted = num_after
            where.append(tokens + place * width)
            factors.append(np.full(len(tokens), sequence.repetition, np.float32))
            amounts.append(np.where(counts > 0, presence + frequency * counts.astype(np.float32), np.float32(0.0)))
    at, factor, amount = (to_device(np.concatenate(parts), logits.device) for parts in (where, factors, amounts))
    flat = logits.view(-1)
    values = flat[at]
    flat[at] = torch.where(values > 0, values / factor, values * factor) - amount


def _counted(tokens: np.ndarray, counts: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
    """Add one `token` to the counts."""
    found = tokens == token
    if found.any():
        return tokens, counts + found
    return np.append(tokens, token), np.append(counts, 1)
