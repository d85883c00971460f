"""Drafting token by token with layers of one's own: what draft models and EAGLE heads have in common.

    tokens   t0 t1 ... tn             one ragged catch-up pass over all rows: KV up to tn, and the first draft d0
    drafts                d0 d1 d2    then one token a pass, for the rows that want more: KV of d0, d1; d2 has none

A row may lag (no drafts asked for, a prefix-cache hit without draft KV, a long prompt): the catch-up pass has a budget
of tokens, shortest lag first, and a row that does not get through drafts nothing in this step and goes on in the next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ..kernels.staging import to_device
from ..platform.core.request import NO_DRAFTS
from .drawing import Drafting, PassOutput, join_drafts
from .proposer import DraftRow, Proposal
from .verification import choose_rule

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CatchUpLimits:
    """How far and how much a drafter computes."""

    block_size: int
    num_positions: int
    """Positions that it can compute of a sequence."""
    max_num_batched_tokens: int
    """Tokens of a catch-up pass."""
    invariant: bool
    """The drafter-invariant rule holds for all requests."""
    first_position: int = 0
    """Positions before it need no computing."""
    drafts_count: bool = True
    """Whether the KV of drafts is as valid as any once they are accepted; else it is computed again."""


class TokenDrafter(Protocol):
    """A network that drafts one token after the other. Hidden states are what it hands itself from pass to pass."""

    def begin(self, sequences: Sequence[Drafting], chunks: list[list[int]]) -> PassOutput:
        """Compute the known tokens `chunks` of each of B sequences from position `start` on."""
        ...

    def go_on(self, sequences: Sequence[Drafting], hidden: Tensor) -> PassOutput:
        """Compute the last draft of each of B sequences, which was made of `hidden` [B, H]."""
        ...

    def draw(self, sequences: Sequence[Drafting], output: PassOutput) -> None:
        """Append one draft to each of B sequences, from what their last pass left."""
        ...


def warn_of_short_reach(model: str | None, max_positions: int, max_model_len: int) -> None:
    """Say so when `model`, which was made for `max_positions`, does not draft for the longest sequences."""
    if max_positions < max_model_len:
        log.warning(
            "speculative_config: %s makes no drafts beyond its max_position_embeddings of %d tokens (2048 where its "
            "config.json has none); max_model_len is %d",
            model,
            max_positions,
            max_model_len,
        )


def propose(drafter: TokenDrafter, rows: Sequence[DraftRow], limits: CatchUpLimits) -> list[Proposal]:
    """Catch up with `rows`, draft for those that ask for it. The KV of drafts is written behind their tokens."""
    if all(row.max_drafts == 0 for row in rows):
        # k = 0 costs nothing: prompts, too, are computed when drafts are wanted.
        return [Proposal(NO_DRAFTS, max(row.num_draft_valid, limits.first_position)) for row in rows]
    sequences = [_drafting(row, limits) for row in rows]
    # Parts of prompts are fed along with others, never for their own sake.
    if any(s.num_wanted for s in sequences):
        behind = _catch_up(drafter, sequences, limits.max_num_batched_tokens)
        if behind is not None:
            _draft(drafter, *behind, drafts_count=limits.drafts_count)
            join_drafts(sequences)
    return [Proposal(s.drafts, s.start) for s in sequences]


def _drafting(row: DraftRow, limits: CatchUpLimits) -> Drafting:
    start = max(row.num_draft_valid, limits.first_position)
    rule = choose_rule(row.request, limits.invariant)
    if row.request.params.max_drafts == 0 or (row.sampled and row.max_drafts == 0):  # maybe it never asks again
        return Drafting(row, rule, start=start, end=start)
    room = min(len(row.block_table) * limits.block_size, limits.num_positions)
    num_tokens = len(row.tokens)
    num_wanted = 0
    if row.sampled and num_tokens <= room:
        num_wanted = min(row.max_drafts, room - num_tokens + 1)  # the last draft is not computed
    if num_wanted < 1:
        return Drafting(row, rule, start=start, end=max(start, min(row.num_valid, room)))
    # The last token's logits are needed even where its KV should be there already.
    return Drafting(row, rule, num_wanted, start=min(start, num_tokens - 1), end=num_tokens)


def _catch_up(
    drafter: TokenDrafter, sequences: list[Drafting], budget: int
) -> tuple[list[Drafting], PassOutput] | None:
    """One pass over what `sequences` lag, as far as the budget reaches: those that got through and want drafts, with
    what it left of them."""
    behind: list[Drafting] = []
    chunks: list[list[int]] = []
    for sequence in sorted(sequences, key=lambda s: s.end - s.start):
        count = min(sequence.end - sequence.start, budget)
        if count > 0:
            budget -= count
            behind.append(sequence)
            chunks.append(sequence.row.tokens[sequence.start : sequence.start + count])
    if not behind:
        return None
    output = drafter.begin(behind, chunks)
    for sequence, chunk in zip(behind, chunks, strict=True):
        sequence.start += len(chunk)
    return _select(behind, output, [i for i, s in enumerate(behind) if s.start == s.end and s.num_wanted])


def _draft(drafter: TokenDrafter, drafting: list[Drafting], output: PassOutput, drafts_count: bool) -> None:
    while drafting:
        drafter.draw(drafting, output)
        more = [i for i, s in enumerate(drafting) if s.num_drafts < s.num_wanted]
        drafting, output = _select(drafting, PassOutput(output.hidden), more)
        if drafting:
            output = drafter.go_on(drafting, output.hidden)
            for sequence in drafting:
                sequence.start += drafts_count


def _select(sequences: list[Drafting], output: PassOutput, keep: list[int]) -> tuple[list[Drafting], PassOutput]:
    if len(keep) == len(sequences):
        return sequences, output
    index = to_device(np.array(keep, dtype=np.int64), output.hidden.device)
    return [sequences[i] for i in keep], output.rows(index)
