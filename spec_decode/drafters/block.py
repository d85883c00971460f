"""Drafters that make all drafts of a row in one pass over a block: the row's last token, and tokens that stand for
drafts.

The block's KV lies where the next step writes that of accepted tokens, and is overwritten by it.

B rows, T tokens of their blocks, H hidden size, V tokens of the vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from torch import Tensor

from ...kernels.device_outcome import DeviceOutcome, DeviceTokens
from ...kernels.staging import to_device
from ...models.batch import AdapterPreparer, ForwardBatch, LayerKV, SequenceRows, build_batch
from ...models.pass_graphs import PassOptions
from ..verify.draft_sampling import Drafting, draw, join_drafts
from ..verify.verification import choose_rule
from .autoregressive import TokenDrafterOptions
from .base import Drafter, DraftRow, Proposal, TargetOutput, no_adapters
from .one_pass import logits_of_drafts

if TYPE_CHECKING:
    from ...models.batch import PagedModel
    from ...models.pass_graphs import GraphedPass, PassInputs


class BlockDrafter(Drafter):
    """Drafts by a network that computes blocks, with each request's own sampling parameters."""

    def __init__(
        self, network: PagedModel, vocab_size: int, first: int, **options: Unpack[TokenDrafterOptions]
    ) -> None:
        """`vocab_size`: columns of its logits. `first`: the token of a block that predicts the first draft, 0 or 1; the
        tokens after it predict the further ones. `max_num_batched_tokens` does not apply: it never catches up."""
        self._network, self._vocab_size, self._first = network, vocab_size, first
        self._invariant = options.get("invariant", False)
        self._edit_logits = options.get("edit_logits")
        self._graphs = options.get("graphs")
        self._passes: GraphedPass | None = None
        self._kv: Sequence[LayerKV] = ()
        self._block_size = 0
        self._prepare_adapters: AdapterPreparer = no_adapters

    @abstractmethod
    def _stand_ins(self, start: int, count: int) -> list[int]:
        """Tokens [count] that stand for drafts at the positions from `start` on."""

    def _handles(self, row: DraftRow, count: int) -> list[tuple[Any, int]]:
        """Adapters of a block of `count` tokens, each with its number of tokens."""
        return [(row.request.adapter, count)]

    @abstractmethod
    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H] of the blocks, as the output head reads them."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, V] of hidden states [R, H]."""

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """The network's layers of the engine's cache; all of one block size."""
        self._kv, self._block_size, self._prepare_adapters = kv, kv[0].k.shape[2], prepare_adapters
        if self._graphs is not None:
            self._passes = self._graphs.of(
                self._network, kv, self._compute, [prepare_adapters], PassOptions(prompts=False)
            )

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Draft for the rows with `max_drafts` in one pass."""
        step = target.on_device
        sequences = [
            Drafting(row, choose_rule(row.request, self._invariant), self._num_drafts(row, knows=step is None))
            for row in rows
        ]
        order = sorted((i for i, s in enumerate(sequences) if s.num_wanted > 0), key=lambda i: -sequences[i].num_wanted)
        if order:
            outcome = None
            if step is not None:
                assert step.outcome is not None, "rows with drafts reach their end"
                outcome = step.outcome.of(order)
            self._draft([sequences[i] for i in order], outcome)
        return [Proposal(s.drafts, len(s.row.tokens)) for s in sequences]

    def _num_drafts(self, row: DraftRow, *, knows: bool) -> int:
        """Drafts that a row gets. If the host `knows` its tokens, a row without room in its blocks gets fewer."""
        if not row.sampled or row.max_drafts == 0:
            return 0
        if not knows:
            return row.max_drafts
        needs, last = self.needs, len(row.tokens) - 1
        if row.num_valid < last:
            return 0
        slots = len(row.block_table) * self._block_size - last - self._first
        return max(0, min(row.max_drafts, needs.max_drafts, slots, needs.max_positions - last))

    def _draft(self, drafting: list[Drafting], outcome: DeviceOutcome | None) -> None:
        """Draft for B sequences, sorted by descending number of drafts; `outcome`: theirs, if the host does not know
        it."""
        rows = self._rows(drafting, outcome)
        lengths = zip(drafting, rows.query_lens, strict=True)
        handles = [handle for s, count in lengths for handle in self._handles(s.row, count)]
        found = None if self._passes is None else self._passes.run(rows, handles)
        if found is None:
            found = (self._forward(build_batch(rows, self._network, self._kv, self._prepare_adapters(handles))),)
        self._draw(drafting, self._by_draft(drafting, rows, found[0]), outcome)
        join_drafts(drafting)

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute the blocks of all rows, in a graph."""
        return (self._forward(batch),)

    def _by_draft(
        self, drafting: list[Drafting], rows: SequenceRows, hidden: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`logits_of_drafts` of sequences, from hidden states [T, H] of all blocks."""
        starts = np.cumsum(rows.query_lens) - rows.query_lens + self._first
        counts, first = [s.num_wanted for s in drafting], to_device(starts, hidden.device)
        return logits_of_drafts(counts, first, hidden, self._logits, self._vocab_size)

    def _draw(
        self, drafting: list[Drafting], outputs: Iterator[tuple[Tensor, Tensor]], outcome: DeviceOutcome | None
    ) -> None:
        """Draw all drafts from the hidden states and logits of each in turn."""
        overshoot = None if outcome is None else outcome.total
        for hidden, logits in outputs:
            there = None if overshoot is None else overshoot[: len(hidden)]
            draw(drafting[: len(hidden)], logits, None, self._edit_logits, overshoot=there)

    def _rows(self, drafting: Sequence[Drafting], outcome: DeviceOutcome | None) -> SequenceRows:
        """Rows of the blocks: the last token of each sequence, and those that stand for drafts."""
        counts = [s.num_wanted - 1 + self._first for s in drafting]
        starts = [len(s.row.tokens) - 1 for s in drafting]
        token_ids: list[int] = []
        firsts: list[int] = []
        for sequence, start, count in zip(drafting, starts, counts, strict=True):
            firsts.append(len(token_ids))
            last = sequence.row.tokens[-1] if outcome is None else 0
            token_ids += [last, *self._stand_ins(start + 1, count)]
        rows = SequenceRows(
            token_ids=token_ids,
            query_lens=[1 + count for count in counts],
            starts=starts,
            block_tables=[s.row.block_table for s in drafting],
        )
        if outcome is not None:
            rows.device_tokens = [DeviceTokens(firsts, outcome.next_tokens, range(len(drafting)))]
            rows.overshoot = outcome.total
        return rows
