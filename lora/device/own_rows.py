"""An adapter's own rows of the token embeddings, the head and the score matrix, which replace the base's.

PEFT's `modules_to_save` gives whole matrices, `trainable_token_indices` some of their rows. The adapter's tokens look
up these rows, and its logits come from them. Other tokens of the step are unaffected, and a step without such an
adapter does nothing here.

An adapter may have more tokens than the base model, from id V on. Then the logits of a step with one of its requests
are wider, and -inf for tokens that a row's adapter does not have. All other steps are as wide as the base model's.

T tokens of a step; V vocabulary of the base model; W columns of a step's logits; H hidden; n rows of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.staging import upload
from .layout import LM_HEAD, SCORE, OwnRows
from .pool import Allocation

if TYPE_CHECKING:
    from ...kernels.linear import Packed
    from ...models.layers.embedding import Embedding
    from .layers import LoraBatch


_COLUMNS = 64
"""Columns are added to the logits in multiples of this: kernels are specialised for multiples of 16."""


class _DeviceRows(NamedTuple):
    """Rows of one adapter on the device; `table` and `head` are None if the adapter has none."""

    table: OwnRows | None
    head: Packed | None
    """Product with the head's rows [n, H]."""
    head_index: Tensor | None
    """[n]: tokens of these rows; None: the tokens 0 to n - 1."""
    head_size: int
    """Number of tokens that have a logit."""
    vocab_size: int
    """Number of the adapter's tokens."""
    score: Tensor | None
    """Score matrix [labels, H] float32 of a classifier."""


class OwnRowSites:
    """Own rows of the adapters on the device. They are freed with the adapter's `Allocation`."""

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
        table, head, score = map(own.get, (self._embedding.names.table, LM_HEAD, SCORE))
        device, base = self._embedding.device, self._embedding.vocab_size
        self._rows[allocation] = _DeviceRows(
            table and OwnRows(table.weight.to(device), _to(table.tokens, device)),
            head and self._embedding.pack_head(head.weight, head.tokens, head.bias),
            _to(head.tokens, device) if head else None,
            head_size=head.vocab_size or base if head else base,
            vocab_size=max(base, *(rows.vocab_size for rows in own.values())),
            score=score and score.weight.to(device),
        )

    def lookup(self, y: Tensor, input_ids: Tensor, adapters: LoraBatch) -> None:
        """Replace the embeddings y [T, H] of tokens `input_ids` [T] that their adapters have rows for."""
        for found, start, stop in self._of_runs(adapters):
            if found.table is None:
                continue
            weight, index = found.table[:2]
            ids, last = input_ids[start:stop], len(weight) - 1
            if index is None:
                place, known = ids.clamp(max=last), ids <= last
            else:
                place = torch.searchsorted(index, ids).clamp(max=last)
                known = index[place] == ids
            y[start:stop] = torch.where(known.unsqueeze(1), weight[place], y[start:stop])

    def logits(self, y: Tensor, hidden: Tensor, adapters: LoraBatch) -> Tensor:
        """Return the logits y [T, V] as [T, W], with those of the adapters' own rows, for hidden states [T, H]. Apply
        `mask` after scales and caps."""
        found = self._of_runs(adapters)
        added = max((rows.vocab_size for rows, _, _ in found), default=0) - y.shape[1]
        if added > 0:
            y = F.pad(y, (0, -(-added // _COLUMNS) * _COLUMNS))
        for rows, start, stop in found:
            if rows.head is None:
                continue
            own, part = rows.head(hidden[start:stop]).to(y.dtype), y[start:stop]
            if rows.head_index is not None:
                part[:, rows.head_index] = own
            else:
                part[:, : own.shape[1]] = own
        return y

    def score(self, adapters: LoraBatch) -> Tensor | None:
        """Return the score matrix [labels, H] of a batch of one row; None if its adapter has none."""
        return next((rows.score for rows, _, _ in self._of_runs(adapters)), None)

    def mask(self, y: Tensor, adapters: LoraBatch) -> None:
        """Set logits y [T, W] to -inf for tokens that a row's adapter does not have."""
        base = self._embedding.vocab_size
        found = [run for run in self._of_runs(adapters) if run[0].head_size != base]
        lowest = min((rows.head_size for rows, _, _ in found), default=base)
        lowest = min(lowest, base)
        if lowest == y.shape[1]:
            return
        sizes = np.full(len(y), base)
        for rows, start, stop in found:
            sizes[start:stop] = rows.head_size
        (limits,) = upload(y.device, sizes)
        columns = torch.arange(lowest, y.shape[1], device=y.device)
        y[:, lowest:].masked_fill_(columns >= limits.unsqueeze(1), -torch.inf)

    def _of_runs(self, adapters: LoraBatch) -> list[tuple[_DeviceRows, int, int]]:
        """Return the rows of each run that has some, and the run's tokens [start, stop)."""
        found = ((self._rows.get(run.owner), run) for run in adapters.runs if run.owner is not None)
        return [(rows, run.start, run.stop) for rows, run in found if rows is not None]


def _to(index: Tensor | None, device: torch.device) -> Tensor | None:
    return None if index is None else index.to(device)
