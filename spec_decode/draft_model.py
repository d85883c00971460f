"""A small causal LM that drafts for a large one (Leviathan et al. 2023, section 3; Chen et al. 2023).

Its layers are further layers of the target's block table: where the target keeps position i of a sequence, so does the
draft model. So blocks, prefix cache and preemption hold for both.

    tokens   t0 t1 ... tn             one ragged catch-up pass over all rows: KV up to tn, and the first draft d0
    drafts                d0 d1 d2    then one token a pass, for the rows that want more: KV of d0, d1; d2 has none

A row may lag (no drafts asked for, a prefix-cache hit without draft KV, a long prompt): the catch-up pass has a budget
of tokens, shortest lag first, and a row that does not get through drafts nothing in this step and goes on in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.noise import Stream, gumbel_argmax, row_keys
from ..kernels.sampling import filter_logits
from ..models.batch import LayerKV, SequenceRows, build_batch
from ..platform.core.errors import InvalidRequestError
from ..platform.core.request import NO_DRAFTS, Drafts
from ..platform.core.speculative_config import SpeculativeConfig
from .factory import ProposerContext
from .proposer import AdapterPreparer, DraftRow, Proposal, ProposerNeeds, TargetOutput, no_adapters
from .verification import Rule, choose_rule, target_tokens

if TYPE_CHECKING:
    from ..models.decoder import Decoder


def load_draft_model(config: SpeculativeConfig, context: ProposerContext) -> DraftModelProposer:
    """Load `config.model` as a drafter.

    Raises:
        InvalidRequestError: its vocabulary is not the target's.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    from ..models.loader import load_model, read_facts, resolve_model_path

    path = resolve_model_path(config.model or "")
    facts = read_facts(path, context.dtype)
    vocab_size = context.target.config.vocab_size
    if facts.vocab_size != vocab_size:
        raise InvalidRequestError(
            f"speculative_config: the draft model {config.model} has a vocabulary of {facts.vocab_size} tokens, "
            f"the target one of {vocab_size}; they must be the same",
            param="speculative_config",
        )
    model = load_model(
        path,
        dtype=context.dtype,
        device=context.device,
        load_format=context.load_format,
        progress=context.progress,
        seed=context.seed,
    )
    return DraftModelProposer(
        model,
        invariant=config.rejection_sample_method == "invariant",
        max_num_batched_tokens=context.max_num_batched_tokens,
    )


@dataclass(slots=True)
class _Sequence:
    """One row while it is drafted for; lives for one `propose`."""

    row: DraftRow
    rule: Rule
    start: int
    """Leading positions whose draft KV is valid."""
    end: int
    """How far the catch-up pass would have to get."""
    num_wanted: int
    """Drafts to make once it has got there."""
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)
    """[V] float32 each, when the request is verified by rejection sampling."""

    @property
    def drafts(self) -> Drafts:
        """What was drafted."""
        if not self.draft_ids:
            return NO_DRAFTS
        return Drafts(self.draft_ids, torch.stack(self.draft_probs) if self.draft_probs else None)


class DraftModelProposer:
    """Drafts by a causal LM with the target's vocabulary and each request's own sampling parameters.

    Greedy requests get its most likely tokens; requests under the drafter-invariant rule draw from its q with the noise
    that the target will use; the others draw with noise of their own, and q goes along for rejection sampling.
    """

    def __init__(self, model: Decoder, *, invariant: bool = False, max_num_batched_tokens: int = 2048) -> None:
        """`model` belongs to the proposer; `invariant`: the drafter-invariant rule holds for all requests."""
        self._model = model
        self._invariant = invariant
        self._max_num_batched_tokens = max_num_batched_tokens
        self._kv: Sequence[LayerKV] = ()
        self._prepare_adapters: AdapterPreparer = no_adapters

    @property
    def needs(self) -> ProposerNeeds:
        """The draft model's layers, and its projections for adapters' draft weights."""
        return ProposerNeeds(kv_layers=tuple(self._model.kv_layers), linears=tuple(self._model.linears()))

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache; all of one block size."""
        self._kv = kv
        self._prepare_adapters = prepare_adapters

    def forget_adapter(self, digest: bytes) -> None:
        """Nothing outlives a request."""

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Catch up with `rows`, draft for those that ask for it. The KV of drafts is written behind their tokens."""
        sequences = [self._sequence(row) for row in rows]
        # Rows that ask for nothing are fed along with others, never for their own sake: k = 0 costs nothing.
        if any(s.num_wanted or (s.start < s.end and not s.row.sampled) for s in sequences):
            drafting = self._catch_up(sequences)
            while drafting := [s for s in drafting if len(s.draft_ids) < s.num_wanted]:
                starts = [len(s.row.tokens) + len(s.draft_ids) - 1 for s in drafting]
                last = self._forward(drafting, [s.draft_ids[-1:] for s in drafting], starts)
                self._draw(drafting, last)
                for sequence, start in zip(drafting, starts, strict=True):
                    sequence.start = start + 1
        return [Proposal(s.drafts, s.start) for s in sequences]

    def _sequence(self, row: DraftRow) -> _Sequence:
        start = row.num_draft_valid
        rule = choose_rule(row.request, self._invariant)
        if row.request.params.max_drafts == 0:
            return _Sequence(row, rule, start, end=start, num_wanted=0)
        room = len(row.block_table) * self._kv[0].k.shape[2]
        room = min(room, self._model.config.max_position_embeddings)
        num_tokens = len(row.tokens)
        num_wanted = 0
        if row.sampled and num_tokens <= room:
            num_wanted = min(row.max_drafts, room - num_tokens + 1)  # the last draft is not computed
        if num_wanted < 1:
            return _Sequence(row, rule, start, end=max(start, min(row.num_valid, room)), num_wanted=0)
        # The last token's logits are needed even where its KV should be there already.
        return _Sequence(row, rule, min(start, num_tokens - 1), end=num_tokens, num_wanted=num_wanted)

    def _catch_up(self, sequences: list[_Sequence]) -> list[_Sequence]:
        """One pass over what `sequences` lag, as far as the budget reaches; the first drafts of those that got through.
        Returns the latter."""
        budget = self._max_num_batched_tokens
        behind: list[_Sequence] = []
        chunks: list[list[int]] = []
        for sequence in sorted(sequences, key=lambda s: s.end - s.start):
            count = min(sequence.end - sequence.start, budget)
            if count > 0:
                budget -= count
                behind.append(sequence)
                chunks.append(sequence.row.tokens[sequence.start : sequence.start + count])
        if not behind:
            return []
        last = self._forward(behind, chunks, [s.start for s in behind])
        for sequence, chunk in zip(behind, chunks, strict=True):
            sequence.start += len(chunk)
        through = [i for i, s in enumerate(behind) if s.start == s.end and s.num_wanted]
        drafting = [behind[i] for i in through]
        if drafting:
            self._draw(drafting, last[torch.tensor(through, device=last.device)])
        return drafting

    def _forward(self, sequences: list[_Sequence], token_ids: list[list[int]], starts: list[int]) -> Tensor:
        """Compute `token_ids` of each of B sequences from position `starts` on: the last ones' hidden states [B, H]."""
        rows = SequenceRows(
            token_ids=[token for chunk in token_ids for token in chunk],
            query_lens=[len(chunk) for chunk in token_ids],
            starts=starts,
            block_tables=[s.row.block_table for s in sequences],
        )
        handles = [(s.row.request.adapter, len(chunk)) for s, chunk in zip(sequences, token_ids, strict=True)]
        batch = build_batch(rows, self._model, self._kv, self._prepare_adapters(handles))
        hidden = self._model.forward(batch).hidden
        lengths = torch.tensor(rows.query_lens)
        return hidden[(lengths.cumsum(0) - 1).to(hidden.device)]

    def _draw(self, sequences: list[_Sequence], hidden: Tensor) -> None:
        """Append one draft to each of B sequences, from the hidden states [B, H] before it."""
        params = [s.row.request.params for s in sequences]
        logits = filter_logits(
            self._model.compute_logits(hidden),
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
        )
        seeds = [s.row.request.seed_key for s in sequences]
        positions = [len(s.row.tokens) + len(s.draft_ids) for s in sequences]
        independent = [i for i, s in enumerate(sequences) if s.rule is Rule.REJECTION]
        greedy = [s.rule is not Rule.INVARIANT for s in sequences]  # independent ones are overwritten below
        tokens = target_tokens(logits, seeds, positions, greedy)
        if independent:
            index = torch.tensor(independent, device=logits.device)
            q = logits[index].softmax(dim=-1)
            keys = row_keys([seeds[i] for i in independent], [positions[i] for i in independent], Stream.DRAFT)
            tokens[index] = gumbel_argmax(q.log(), keys.to(q.device))
            for i, probs in zip(independent, q, strict=True):
                sequences[i].draft_probs.append(probs)
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.draft_ids.append(token)
