"""Token embeddings and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.linear import PackedLinear, pack
from .weights import WeightSlot

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class Embedding:
    """Token embeddings, and the LM head. Tied, the head has its own packed copy: a lookup needs plain rows."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (vocab_size, hidden_size)
        self._tied = tied
        self._dtype = dtype
        self._device = device
        self._table: Tensor | None = None
        self._head: PackedLinear | None = None

    def lookup(self, input_ids: Tensor) -> Tensor:
        """[T] token ids to [T, hidden]."""
        return F.embedding(input_ids, self._table)  # type: ignore[arg-type]  # the loader left no slot empty

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to float32 logits [R, vocab]."""
        return self._head(hidden).float()  # type: ignore[misc]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names; a tied head has none."""
        scale = self._shape[1] ** -0.5
        slots = {EMBEDDING: WeightSlot(self._shape, self._load_table, scale)}
        if not self._tied:
            slots[LM_HEAD] = WeightSlot(self._shape, self._load_head, scale)
        return slots

    def _load_table(self, tensor: Tensor) -> None:
        self._table = tensor.to(self._device, self._dtype, copy=True).contiguous()
        if self._tied:
            self._head = pack(self._table)

    def _load_head(self, tensor: Tensor) -> None:
        self._head = pack(tensor.to(self._device, self._dtype, copy=True))
