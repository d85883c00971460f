"""Drafting token by token with layers of one's own: what draft models and EAGLE heads have in common.

    tokens   t0 t1 ... tn             one ragged catch-up pass over all rows: KV up to tn, and the first draft d0
    drafts                d0 d1 d2    then one token a pass, for the rows that want more: KV of d0, d1; d2 has none

A row may lag (no drafts asked for, a prefix-cache hit without draft KV, a long prompt): the catch-up pass has a budget
of tokens, shortest lag first, and a row that does not get through drafts nothing in this step and goes on in the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...kernels.device_outcome import DeviceOutcome, DeviceTokens
from ...kernels.staging import to_device
from ...models.batch import SequenceRows
from ...platform.core.request import NO_DRAFTS, Status
from ..verify.draft_sampling import Drafting, PassOutput, join_drafts, last_drafts
from ..verify.verification import choose_rule
from .base import DeviceStep, DraftRow, Proposal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CatchUpLimits:
    """Limits of what a drafter computes."""

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
    """True when the KV of drafts stays valid once they are accepted; else it is computed again."""


class TokenDrafter(Protocol):
    """A network that drafts one token after the other, and hands hidden states to itself from pass to pass."""

    def begin(self, sequences: Sequence[Drafting], chunks: list[list[int]]) -> PassOutput:
        """Compute the known tokens `chunks` of each of B sequences from position `start` on."""
        ...

    def go_on(self, sequences: Sequence[Drafting], output: PassOutput) -> PassOutput:
        """Compute the last draft of each of B sequences, which was made of `output`."""
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


BeginOnDevice = Callable[[Sequence[Drafting], DeviceOutcome], PassOutput]
"""`TokenDrafter.begin` where the host does not know the tokens: computes, of each of B sequences, 1 + k positions from
that of the first draft on; what comes after the last token counts for nothing, and is overwritten. The outcome is that
of these sequences' rows. See `sampled_rows`."""


def propose_on_device(
    drafter: TokenDrafter, rows: Sequence[DraftRow], step: DeviceStep, begin: BeginOnDevice, limits: CatchUpLimits
) -> list[Proposal]:
    """`propose` before the host knows the outcome of a step."""
    assert step.outcome is not None, "rows with drafts reach their end"
    sequences = [Drafting(row, choose_rule(row.request, limits.invariant), row.max_drafts) for row in rows]
    asking = [i for i, sequence in enumerate(sequences) if sequence.num_wanted]
    if asking:
        drafting, of_them = [sequences[i] for i in asking], step.outcome.of(asking)
        output = begin(drafting, of_them)._replace(overshoot=of_them.total)
        _draft(drafter, drafting, output, drafts_count=False)
        join_drafts(drafting)
    return [Proposal(s.drafts, len(s.row.tokens) if s.num_wanted else 0) for s in sequences]


def known_rows(sequences: Sequence[Drafting], chunks: list[list[int]], first_key: int = 0) -> SequenceRows:
    """The pass of `TokenDrafter.begin`."""
    return SequenceRows(
        token_ids=[token for chunk in chunks for token in chunk],
        query_lens=[len(chunk) for chunk in chunks],
        starts=[s.start for s in sequences],
        block_tables=[s.row.block_table for s in sequences],
        first_key=first_key,
        prompt_lens=[s.row.request.num_prompt_tokens for s in sequences],
    )


def sampled_rows(sequences: Sequence[Drafting], outcome: DeviceOutcome, first_key: int = 0) -> SequenceRows:
    """The pass of `BeginOnDevice`."""
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


def draft_rows(sequences: Sequence[Drafting], output: PassOutput, first_key: int = 0) -> SequenceRows:
    """The pass of `TokenDrafter.go_on`."""
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


def _drafting(row: DraftRow, limits: CatchUpLimits) -> Drafting:
    start = max(row.num_draft_valid, limits.first_position)
    rule = choose_rule(row.request, limits.invariant)
    request = row.request
    if (
        request.params.max_drafts == 0
        or request.status is Status.FINISHED
        or (row.sampled and row.max_drafts == 0)  # maybe it never asks again
    ):
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
            chunks.append([*sequence.row.tokens[sequence.start : sequence.start + count]])
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
        if not more:
            return
        drafting, output = _select(drafting, PassOutput(output.hidden, overshoot=output.overshoot), more)
        output = drafter.go_on(drafting, output)._replace(overshoot=output.overshoot)
        for sequence in drafting:
            sequence.start += drafts_count


def _select(sequences: list[Drafting], output: PassOutput, keep: list[int]) -> tuple[list[Drafting], PassOutput]:
    if len(keep) == len(sequences):
        return sequences, output
    index = to_device(np.array(keep, dtype=np.int64), output.hidden.device)
    return [sequences[i] for i in keep], output.rows(index)
