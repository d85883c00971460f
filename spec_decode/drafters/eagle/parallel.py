"""P-EAGLE heads as drafters: all drafts of a row from the pass that catches up with it.

    position    1   2  ...  n     n+1    n+2        a row that gets 3 drafts
    token       t1  t2 ...  tn    mask   mask
    state       g0  g1 ...  gn-1  m      m          m: the learned state of masks
    predicts                d0    d1     d2

Masks are computed with the position, and write KV to the slots, of the drafts before them. That KV never counts as
computed: the next pass over the row begins at position n + 1 at the latest, and overwrites it.

B rows, T tokens of a pass, K drafts, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import DeviceOutcome, DeviceTokens
from ....kernels.staging import to_device, upload
from ....models.batch import AdapterPreparer, ForwardBatch, LayerKV, SequenceRows, build_batch
from ....models.pass_graphs import PassOptions
from ...verify.draft_sampling import Drafting, draw
from ..autoregressive import TokenDrafterOptions
from ..one_pass import logits_of_drafts
from .drafter import EagleDrafter
from .head import EagleHead

if TYPE_CHECKING:
    from ....models.pass_graphs import GraphedPass, PassInputs


class ParallelEagleDrafter(EagleDrafter):
    """Drafts by a P-EAGLE head with each request's own sampling parameters."""

    def __init__(self, head: EagleHead, **options: Unpack[TokenDrafterOptions]) -> None:
        """See `EagleDrafter`."""
        self._parallel, self._graphs_of_passes = head, options.get("graphs")
        options["graphs"] = None  # there is no chain of passes
        super().__init__(head, **options)
        head.mask_states(1, None)  # kept by the head, so that it is replaced with the head's weights
        self._graphed: GraphedPass | None = None

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache."""
        super().bind(kv, prepare_adapters)
        if self._graphs_of_passes is not None:
            self._graphed = self._graphs_of_passes.of(
                self._parallel, self._kv, self._compute, [prepare_adapters], self.pass_options or PassOptions()
            )

    def _compute_and_draft(
        self,
        sequences: list[Drafting],
        rows: SequenceRows,
        states: Tensor | None,
        drafting: list[int],
        outcome: DeviceOutcome | None = None,
    ) -> None:
        """See `TokenDrafter`."""
        overshoot = None if outcome is None else outcome.total
        assert states is not None
        order = sorted(drafting, key=lambda i: -sequences[i].num_wanted)
        masks = np.zeros(len(sequences), dtype=np.int64)
        masks[order] = [sequences[i].num_wanted - 1 for i in order]
        wide, index, last = self._with_masks(rows, masks)
        adapters = [s.row.request.adapter for s in sequences]
        if masks.any():
            of_masks = self._prepare_adapters([(adapter, 1) for adapter in adapters])
            states = torch.cat((states, self._parallel.mask_states(len(sequences), of_masks))).index_select(0, index)
        hidden = self._hidden(wide, list(zip(adapters, wide.query_lens, strict=True)), states)
        if not order:
            return
        wanted, chosen = [sequences[i] for i in order], to_device(np.array(order), hidden.device)
        counts, vocabulary = [s.num_wanted for s in wanted], self._head.vocabulary
        early = None if overshoot is None else overshoot[chosen]
        for _, logits in logits_of_drafts(counts, last[chosen], hidden, self._head.logits, self._vocab_size):
            there = None if early is None else early[: len(logits)]
            draw(wanted[: len(logits)], logits, vocabulary, self._edit_logits, overshoot=there)

    def _hidden(self, rows: SequenceRows, handles: list[tuple[object, int]], states: Tensor) -> Tensor:
        """Hidden states [T or more, H] of all tokens."""
        found = None if self._graphed is None else self._graphed.run(rows, handles, states)
        if found is not None:
            return found[0]
        batch = build_batch(rows, self._parallel, self._kv, self._prepare_adapters(handles))
        return self._parallel.forward(batch, states, None)

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute the hidden states of all tokens, in a graph."""
        assert inputs.states is not None
        return (self._parallel.forward(batch, inputs.states, None),)

    def _with_masks(self, rows: SequenceRows, masks: np.ndarray) -> tuple[SequenceRows, Tensor, Tensor]:
        """Rows with masks [B] after the last token of each. Tokens of `rows` that do not count (`SequenceRows.unused`)
        follow as further masks, which no draft depends on.

        Returns: the rows; for each of their tokens its index in `rows`, or T + b for masks of row b; and the index [B]
        of the last token of each row.
        """
        device = self._parallel.device
        lens = np.array(rows.query_lens)
        counts, old_starts = lens + masks, np.cumsum(lens) - lens
        starts, row = np.cumsum(counts) - counts, np.repeat(np.arange(len(lens)), counts)
        place, total = np.arange(len(row)) - starts[row], len(rows.token_ids)
        parts = upload(device, lens, starts, row, place, old_starts[row] + place, np.array(rows.token_ids))
        num_valid, first, row_of, place_of, index, ids = parts
        for tokens in rows.device_tokens:
            tokens.fill(ids)
        if rows.unused is not None:
            num_valid = num_valid - rows.unused
        index = torch.where(place_of < num_valid[row_of], index, total + row_of)
        mask_ids = ids.new_full((len(lens),), self._parallel.config.mask_token_id or 0)
        every = list(range(len(row)))
        wide = SequenceRows(
            token_ids=[0] * len(row),
            query_lens=counts.tolist(),
            starts=rows.starts,
            block_tables=rows.block_tables,
            first_key=rows.first_key,
            device_tokens=[DeviceTokens(every, torch.cat((ids, mask_ids))[index], every)],
            overshoot=rows.overshoot,
            prompt_lens=rows.prompt_lens,
        )
        return wide, index, first + num_valid - 1
