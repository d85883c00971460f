"""Rows of the token embeddings and of the head that an adapter brings itself, in place of the base model's.

PEFT's `modules_to_save` gives whole matrices, `trainable_token_indices` some of their rows. The adapter's tokens look
up these rows, and its logits come from them. Other tokens of the step are left alone, and a step without such an
adapter does nothing here.

T tokens of a step; V vocabulary; H hidden; n rows of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .layout import LM_HEAD, OwnRows
from .pool import Allocation

if TYPE_CHECKING:
    from ...kernels.linear import Packed
    from ...models.layers.embedding import Embedding
    from .layers import LoraBatch


class _DeviceRows(NamedTuple):
    """Rows of one adapter on the device; `table` and `head` are None where the adapter has none."""

    table: OwnRows | None
    head: Packed | None
    """Product with the head's rows [n, H]."""
    head_index: Tensor | None
    """[n]: tokens of these rows; None: the tokens 0 to n - 1."""


class OwnRowSites:
    """Own rows of the adapters on the device. They leave its memory with the adapter's `Allocation`."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self._rows: WeakKeyDictionary[Allocation, _DeviceRows] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Return the number of adapters with own rows."""
        return len(self._rows)

    @torch.inference_mode()
    def write(self, allocation: Allocation, own: Mapping[str, OwnRows]) -> None:
        """Write an adapter's rows by module."""
        if not own:
            return
        table, head = own.get(self._embedding.names.table), own.get(LM_HEAD)
        device = self._embedding.device
        self._rows[allocation] = _DeviceRows(
            table and OwnRows(table.weight.to(device), _to(table.tokens, device)),
            head and self._embedding.pack_head(head.weight, head.tokens),
            _to(head.tokens, device) if head else None,
        )

    def lookup(self, y: Tensor, input_ids: Tensor, adapters: LoraBatch) -> None:
        """Replace the embeddings y [T, H] of tokens `input_ids` [T] that their adapters have rows for."""
        for owner, start, stop in adapters.runs:
            found = self._rows.get(owner) if owner is not None else None
            if found is None or found.table is None:
                continue
            weight, index = found.table
            ids, last = input_ids[start:stop], len(weight) - 1
            if index is None:
                place, known = ids.clamp(max=last), ids <= last
            else:
                place = torch.searchsorted(index, ids).clamp(max=last)
                known = index[place] == ids
            y[start:stop] = torch.where(known.unsqueeze(1), weight[place], y[start:stop])

    def logits(self, y: Tensor, hidden: Tensor, adapters: LoraBatch) -> None:
        """Replace the logits y [T, V] that come from rows of their adapters' own, for hidden states [T, H]."""
        for owner, start, stop in adapters.runs:
            found = self._rows.get(owner) if owner is not None else None
            if found is None or found.head is None:
                continue
            own, part = found.head(hidden[start:stop]).to(y.dtype), y[start:stop]
            if found.head_index is not None:
                part[:, found.head_index] = own
            else:
                part[:, : own.shape[1]] = own
                part[:, own.shape[1] :] = -torch.inf  # the adapter was trained with a smaller vocabulary


def _to(index: Tensor | None, device: torch.device) -> Tensor | None:
    return None if index is None else index.to(device)
