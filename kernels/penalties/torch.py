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
    places: list[int] = []
    of_rows: list[np.ndarray] = []
    strengths: list[tuple[float, float, float]] = []
    for sequence in sequences:
        after = [token for part in sequence.after for token in part]
        entries, num_counted = sequence.entries, 0
        for place, num_after in sorted(zip(sequence.places, sequence.num_after, strict=True), key=lambda row: row[1]):
            for token in after[num_counted:num_after]:
                if token >= 0:
                    entries = _counted(entries, token)
            num_counted = num_after
            places.append(place)
            of_rows.append(entries)
            strengths.append((sequence.repetition, sequence.presence, sequence.frequency))
    lengths, all_entries = [len(entries) for entries in of_rows], np.concatenate(of_rows)
    factors, presence, frequency = np.repeat(np.array(strengths, np.float32).T, lengths, axis=1)
    counts = (all_entries & _COUNT).astype(np.float32)
    amounts = np.where(counts > 0, presence + frequency * counts, np.float32(0.0))
    where = (all_entries >> COUNT_BITS) + np.repeat(places, lengths) * width
    at, factor, amount = (to_device(array, logits.device) for array in (where, factors, amounts))
    flat = logits.view(-1)
    values = flat[at]
    flat[at] = torch.where(values > 0, values / factor, values * factor) - amount


def _counted(entries: np.ndarray, token: int) -> np.ndarray:
    """`entries` with one more `token`."""
    found = entries >> COUNT_BITS == token
    return entries + found if found.any() else np.append(entries, token << COUNT_BITS | 1)
