"""Drafting token by token with layers of its own: the common part of draft models and EAGLE heads.

    tokens   t0 t1 ... tn             one ragged catch-up pass over all rows: KV up to tn, and the first draft d0
    drafts                d0 d1 d2    then one token a pass, for rows with more drafts: KV of d0, d1; d2 has none

All passes and draws are one graph if the device allows it (`models/pass_chain`); else each pass is one, or its kernels
are launched separately.

A row may lag (no drafts requested, a prefix-cache hit without draft KV, a long prompt): the catch-up pass has a budget
of tokens, shortest lag first, and a row that does not catch up drafts nothing in this step and continues in the next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from ...kernels.device_outcome import DeviceOutcome, DeviceTokens
from ...kernels.staging import to_device
from ...models.batch import AdapterPreparer, ForwardBatch, LayerKV, SequenceRows
from ...platform.core.request import NO_DRAFTS, Request, Status
from ...platform.core.speculative_config import SpeculativeConfig
from ..verify.draft_sampling import (
    Drafting,
    DraftVocabulary,
    EditLogits,
    PassOutput,
    append_drawn,
    chain_draws,
    draw,
    join_drafts,
    last_drafts,
)
from ..verify.verification import choose_rule
from .base import DeviceStep, Drafter, DraftRow, Proposal, TargetOutput, no_adapters
from .factory import DrafterContext

if TYPE_CHECKING:
    from ...models.pass_chain import PassChain
    from ...models.pass_graphs import PassGraphs, PassInputs, PassOptions

log = logging.getLogger(__name__)


def warn_of_short_reach(model: str | None, max_positions: int, max_model_len: int) -> None:
    """Warn if `model`, which was made for `max_positions`, cannot draft for the longest sequences."""
    if max_positions < max_model_len:
        log.warning(
            "speculative_config: %s makes no drafts beyond its max_position_embeddings of %d tokens (2048 if its "
            "config.json has none); max_model_len is %d",
            model,
            max_positions,
            max_model_len,
        )


class TokenDrafterOptions(TypedDict, total=False):
    """Options of a `TokenDrafter`, by keyword."""

    invariant: bool
    """The drafter-invariant rule holds for all requests."""
    max_num_batched_tokens: int
    """Tokens of a catch-up pass."""
    edit_logits: EditLogits | None
    graphs: PassGraphs | None
    """Short passes are captured there."""


def token_drafter_options(config: SpeculativeConfig, context: DrafterContext) -> TokenDrafterOptions:
    """Options of a drafter of this configuration."""
    return {
        "invariant": config.rejection_sample_method == "invariant",
        "max_num_batched_tokens": context.max_num_batched_tokens,
        "edit_logits": context.edit_logits,
        "graphs": context.graphs,
    }


class TokenDrafter(Drafter):
    """A network with KV layers of its own that drafts one token after the other, with each request's own sampling
    parameters."""

    first_position = 0
    """First position that is computed; those before hold no keys."""
    drafts_count = True
    """True when the KV of drafts stays valid once they are accepted; else it is computed again."""
    reads_states = False
    """True when a pass over a token reads a hidden state of the token before it."""
    pass_options: PassOptions | None = None

    def __init__(self, network: Any, vocab_size: int, **options: Unpack[TokenDrafterOptions]) -> None:
        """`network` belongs to the drafter; its logits have `vocab_size` columns."""
        self._invariant = options.get("invariant", False)
        self._max_num_batched_tokens = options.get("max_num_batched_tokens", 2048)
        self._edit_logits = options.get("edit_logits")
        self._graphs = graphs = options.get("graphs")
        self._network, self._vocab_size = network, vocab_size
        if graphs is not None and graphs.captures(network):
            self._logits = graphs.row_logits(vocab_size, network.device)
        self._passes: PassChain | None = None
        self._kv: Sequence[LayerKV] = ()
        self._block_size = self._num_positions = 0
        self._prepare_adapters: AdapterPreparer = no_adapters

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache; all of one block size."""
        self._kv = kv
        self._block_size, self._num_positions = kv[0].k.shape[2], self.needs.max_positions
        self._prepare_adapters = prepare_adapters
        if self._graphs is not None and self._graphs.captures(self._network):
            from ...models.pass_chain import PassChain
            from ...models.pass_graphs import PassOptions

            network, options = self._network, self.pass_options or PassOptions()
            columns = self._widened(torch.zeros(1, self._vocab_size, device=network.device)).shape[1]
            self._passes = self._graphs.add(
                PassChain(
                    *(self._graphs, network, network.attention, kv, self._compute, [prepare_adapters], options),
                    widen=self._widened,
                    vocab_size=columns,
                )
            )

    # --- the network's part ---

    def _known_states(self, rows: SequenceRows) -> Tensor | None:
        """States [T, H] before the tokens of `_known_rows`; None if the network reads none."""
        return None

    def _sampled_states(self, rows: SequenceRows, kept: Any) -> Tensor | None:
        """States [T, H] before the tokens of `_sampled_rows`, from what `_keep` returned. Values after the last token
        of each row are undefined, and overwritten."""
        return None

    def _draw_from(self, output: PassOutput) -> tuple[Tensor, DraftVocabulary | None]:
        """Logits [B, V] of the next draft, and their vocabulary."""
        raise NotImplementedError

    def _widened(self, logits: Tensor) -> Tensor:
        """Logits [B, V] of the target's vocabulary from those of a pass."""
        logits, vocabulary = self._draw_from(PassOutput(logits, logits))
        return logits if vocabulary is None else vocabulary.widen(logits)

    def _run(self, rows: SequenceRows, handles: list[tuple[Any, int]], states: Tensor | None) -> PassOutput:
        """Compute a pass without a graph; `states` [T, H] if the network reads them."""
        raise NotImplementedError

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute a `PassOutput` of all rows, in a graph."""
        raise NotImplementedError

    def _adapter(self, request: Request) -> Any:
        """Handle of a request's draft weights, for `AdapterPreparer`."""
        return request.adapter

    def _keep(self, rows: Sequence[DraftRow], target: TargetOutput) -> Any:
        """Keep the part of the target's output that it needs."""
        return None

    # --- the order of passes ---

    def _forward(self, sequences: Sequence[Drafting], rows: SequenceRows, states: Tensor | None = None) -> PassOutput:
        """Compute the `rows` of B sequences, in a graph if there is one."""
        handles = self._handles(sequences, rows)
        found = None if self._passes is None else self._passes.run(rows, handles, states)
        if found is not None:
            return PassOutput(*(part[: len(sequences)] for part in found))
        return self._run(rows, handles, states)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Catch up with `rows`, and draft for those with `max_drafts`. The KV of drafts is written after their
        tokens."""
        kept, step = self._keep(rows, target), target.on_device
        if step is not None:
            return self._propose_on_device(rows, step, kept)
        if all(row.max_drafts == 0 for row in rows):
            # k = 0 costs nothing: even prompts are computed only when drafts are wanted.
            return [Proposal(NO_DRAFTS, max(row.num_draft_valid, self.first_position)) for row in rows]
        sequences = [self._drafting(row) for row in rows]
        # Parts of prompts are computed only together with other rows.
        if any(s.num_wanted for s in sequences):
            self._catch_up(sequences)
            join_drafts(sequences)
        return [Proposal(s.drafts, s.start) for s in sequences]

    def _propose_on_device(self, rows: Sequence[DraftRow], step: DeviceStep, kept: Any) -> list[Proposal]:
        """Draft before the host knows the outcome of a step."""
        assert step.outcome is not None, "rows with drafts reach their end"
        sequences = [Drafting(row, choose_rule(row.request, self._invariant), row.max_drafts) for row in rows]
        asking = [i for i, sequence in enumerate(sequences) if sequence.num_wanted]
        if asking:
            drafting, of_them = [sequences[i] for i in asking], step.outcome.of(asking)
            known = _sampled_rows(drafting, of_them, self.first_position)
            states = self._sampled_states(known, kept)
            self._compute_and_draft(drafting, known, states, [*range(len(drafting))], of_them)
            join_drafts(drafting)
        return [Proposal(s.drafts, len(s.row.tokens) if s.num_wanted else 0) for s in sequences]

    def _drafting(self, row: DraftRow) -> Drafting:
        start = max(row.num_draft_valid, self.first_position)
        request = row.request
        rule = choose_rule(request, self._invariant)
        if (
            request.params.max_drafts == 0
            or request.status is Status.FINISHED
            or (row.sampled and row.max_drafts == 0)  # maybe no drafts are requested again
        ):
            return Drafting(row, rule, start=start, end=start)
        room = min(len(row.block_table) * self._block_size, self._num_positions)
        num_tokens = len(row.tokens)
        num_wanted = 0
        if row.sampled and num_tokens <= room:
            num_wanted = min(row.max_drafts, room - num_tokens + 1)  # the last draft is not computed
        if num_wanted < 1:
            return Drafting(row, rule, start=start, end=max(start, min(row.num_valid, room)))
        # The last token's logits are needed even if its KV is there already.
        return Drafting(row, rule, num_wanted, start=min(start, num_tokens - 1), end=num_tokens)

    def _catch_up(self, sequences: list[Drafting]) -> None:
        """One pass over the lag of `sequences`, within the budget; drafts of those that caught up and want some."""
        budget = self._max_num_batched_tokens
        behind: list[Drafting] = []
        chunks: list[list[int]] = []
        for sequence in sorted(sequences, key=lambda s: s.end - s.start):
            count = min(sequence.end - sequence.start, budget)
            if count > 0:
                budget -= count
                behind.append(sequence)
                chunks.append([*sequence.row.tokens[sequence.start : sequence.start + count]])
        if not behind:
            return
        rows = _known_rows(behind, chunks, self.first_position)
        states = self._known_states(rows)
        for sequence, chunk in zip(behind, chunks, strict=True):
            sequence.start += len(chunk)
        drafting = [i for i, s in enumerate(behind) if s.start == s.end and s.num_wanted]
        self._compute_and_draft(behind, rows, states, drafting)
        for i in drafting if self.drafts_count else ():
            behind[i].start += behind[i].num_wanted - 1

    def _compute_and_draft(
        self,
        sequences: list[Drafting],
        rows: SequenceRows,
        states: Tensor | None,
        drafting: list[int],
        outcome: DeviceOutcome | None = None,
    ) -> None:
        """Compute the `rows` of B sequences, and make all drafts of those in `drafting`.

        Args:
            outcome: that of the B sequences, if it is on the device alone.
        """
        if not self._loop(sequences, rows, states):
            overshoot = None if outcome is None else outcome.total
            output = self._forward(sequences, rows, states)._replace(overshoot=overshoot)
            self._draft(*_select(sequences, output, drafting))

    def _loop(self, sequences: Sequence[Drafting], rows: SequenceRows, states: Tensor | None) -> bool:
        """Compute the `rows` of B sequences and draft for those that reach their end, in one graph; False, without a
        change, if there is none."""
        if self._passes is None:
            return False
        draws = chain_draws(sequences, self._edit_logits)
        if draws is None:
            return False
        drawn = self._passes.loop(rows, self._handles(sequences, rows), states, draws)
        if drawn is None:
            return False
        append_drawn(sequences, draws, drawn)
        return True

    def _handles(self, sequences: Sequence[Drafting], rows: SequenceRows) -> list[tuple[Any, int]]:
        return [(self._adapter(s.row.request), count) for s, count in zip(sequences, rows.query_lens, strict=True)]

    def _draft(self, drafting: list[Drafting], output: PassOutput) -> None:
        """Make all drafts after the first pass, one pass a draft."""
        overshoot = output.overshoot
        while drafting:
            logits, vocabulary = self._draw_from(output)
            draw(drafting, logits, vocabulary, self._edit_logits, output.best, overshoot)
            more = [i for i, s in enumerate(drafting) if s.num_drafts < s.num_wanted]
            if not more:
                return
            drafting, output = _select(drafting, PassOutput(output.hidden, overshoot=overshoot), more)
            overshoot = output.overshoot
            rows = _draft_rows(drafting, output, self.first_position)
            states = output.hidden if self.reads_states else None
            output = self._forward(drafting, rows, states)._replace(overshoot=overshoot)


def _known_rows(sequences: Sequence[Drafting], chunks: list[list[int]], first_key: int) -> SequenceRows:
    """Rows of a pass over the tokens `chunks` of each sequence, from its position `start` on."""
    return SequenceRows(
        token_ids=[token for chunk in chunks for token in chunk],
        query_lens=[len(chunk) for chunk in chunks],
        starts=[s.start for s in sequences],
        block_tables=[s.row.block_table for s in sequences],
        first_key=first_key,
        prompt_lens=[s.row.request.num_prompt_tokens for s in sequences],
    )


def _sampled_rows(sequences: Sequence[Drafting], outcome: DeviceOutcome, first_key: int) -> SequenceRows:
    """Rows of 1 + k positions of each sequence from that of the first draft on, whose tokens only the device knows."""
    counts = [1 + s.row.num_drafts for s in sequences]
    origins = [s.row.first_index + j for s, count in zip(sequences, counts, strict=True) for j in range(count)]
    return SequenceRows(
        token_ids=[0] * len(origins),
        query_lens=counts,
        starts=[s.row.start + 1 for s in sequences],
        block_tables=[s.row.block_table for s in sequences],
        first_key=first_key,
        device_tokens=[DeviceTokens(range(len(origins)), outcome.tokens, origins)],
        overshoot=outcome.overshoot,
        unused=outcome.unused,
    )


def _draft_rows(sequences: Sequence[Drafting], output: PassOutput, first_key: int) -> SequenceRows:
    """Rows of the last draft of each sequence."""
    token_ids, device_tokens = last_drafts(sequences)
    return SequenceRows(
        token_ids=[token for chunk in token_ids for token in chunk],
        query_lens=[1] * len(sequences),
        starts=[len(s.row.tokens) + s.num_drafts - 1 for s in sequences],
        block_tables=[s.row.block_table for s in sequences],
        first_key=first_key,
        device_tokens=device_tokens,
        overshoot=output.overshoot,
    )


def _select(sequences: list[Drafting], output: PassOutput, keep: list[int]) -> tuple[list[Drafting], PassOutput]:
    if len(keep) == len(sequences):
        return sequences, output
    index = to_device(np.array(keep, dtype=np.int64), output.hidden.device)
    return [sequences[i] for i in keep], output.rows(index)
