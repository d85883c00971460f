"""Learned position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .weights import WeightSlot


class PositionTable:
    """Embedding [H] of each position up to the context length."""

    def __init__(
        self, name: str, shape: tuple[int, int], offset: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape`: positions and hidden size; `offset`: rows of the stored table before position 0."""
        self._name = name
        self._shape = shape
        self._offset = offset
        self._dtype = dtype
        self._device = device
        self._table: Tensor | None = None

    def add(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, H], mutated, plus the embeddings of `positions` [T] int64. Places past the context, which padding
        and drafts may have, count as the last one."""
        places = positions.clamp(max=self._shape[0] - 1)
        return hidden.add_(F.embedding(places, self._table))  # type: ignore[arg-type]  # the loader left no slot empty

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        num_positions, hidden_size = self._shape
        return {f"{self._name}.weight": WeightSlot((num_positions + self._offset, hidden_size), self._load, 0.02)}

    def _load(self, tensor: Tensor) -> None:
        self._table = tensor[self._offset :].to(self._device, self._dtype, copy=True)
