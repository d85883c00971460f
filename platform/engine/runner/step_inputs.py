"""Inputs of a step: from its sequences when it is launched, and from the step before on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....kernels.device_outcome import DeviceIds, DeviceOutcome, DeviceTokens, device_tokens, host_ids
from ....kernels.staging import to_device
from ....models.batch import SequenceRows
from ....spec_decode.drafters.base import DraftRow, Proposal
from ...core.batch import RowPlan, StepPlan
from ...core.request import NO_DRAFTS, Request
from ..sampling.logits_edits import Seen, token_entries
from ..sampling.sampler import SampleRow


class StepInputs(NamedTuple):
    """Inputs of a step from its sequences. These may change while it runs, so later only their constant fields are
    read, and the tokens that bad words depend on: see `SamplingFacts.reads_tokens`."""

    rows: SequenceRows
    handles: list[tuple[Any, int]]
    """(adapter, number of tokens)."""
    with_logits: list[int]
    """Indices of the tokens whose logits are wanted."""
    chosen: list[SampleRow]
    """The sampled rows."""
    prompts: dict[int, tuple[RowPlan, int]]
    """(row, index of its first token) by index of the row, if log-probabilities or hidden states of its prompt are
    wanted."""
    replayable: bool
    """True when all rows are decodes or verifications, whose logits are captured too."""
    sampling: list[int]
    """Indices of the rows of `chosen`."""
    followed: list[int]
    """[R] index of each row's sequence among the chosen rows of the step before, or their number for a row that awaits
    no token. Empty: no row awaits one."""
    drafting: list[DraftRow]
    """The rows, if the device drafts without the host; else empty."""


def prepare(plan: StepPlan, sampled_index: dict[Request, int], *, drafts: bool) -> StepInputs:
    """Read a step's sequences. `sampled_index`: requests' indices among the chosen rows of the step before; `drafts`:
    the device drafts without the host."""
    planned, requests = plan.rows, [row.request for row in plan.rows]
    counts = [row.num_tokens for row in planned]
    firsts = list(accumulate(counts, initial=0))
    rows = SequenceRows(
        token_ids=[token for row in planned for token in _input_tokens(row)],
        query_lens=counts,
        starts=[row.start for row in planned],
        block_tables=[request.blocks for request in requests],
        prompt_lens=[request.num_prompt_tokens for request in requests],
        states=[row.states for row in planned if row.states is not None],
    )
    replayable = all(row.samples and row.num_tokens == 1 + row.num_drafts for row in planned)
    all_tokens, all_rows = (list(range(firsts[-1])), list(range(len(planned)))) if replayable else ([], [])
    step = StepInputs(rows, [], all_tokens, [], {}, replayable, all_rows, [], [])
    given: list[tuple[int, Sequence[int]]] = []
    for index, (row, request, first) in enumerate(zip(planned, requests, firsts, strict=False)):
        step.handles.extend(request.handles(row.start, row.num_tokens))
        end = firsts[index + 1]
        if row.num_drafts and not row.awaits_token:
            given.append((end - row.num_drafts, request.drafts.token_ids))
        num_tokens = row.start + row.num_tokens - row.num_drafts if row.samples else len(request.tokens)
        if row.samples:
            seen = Seen(token_entries(request)) if request.sampling.counts_tokens else None
            step.chosen.append(SampleRow(request, NO_DRAFTS if row.awaits_token else request.drafts, num_tokens, seen))
            if not replayable:
                step.with_logits.extend(range(end - 1 - row.num_drafts, end))
                step.sampling.append(index)
        if num_tokens == request.num_prompt_tokens and request.params.reads_prompt:
            step.prompts[index] = row, first
    if drafts:
        step.drafting.extend(map(_row_on_device, planned, firsts))
    rows.device_tokens = device_tokens(given)
    if any(row.awaits_token for row in plan.rows):
        step.followed.extend(
            sampled_index[row.request] if row.awaits_token else len(sampled_index) for row in plan.rows
        )
    return step


def continued(step: StepInputs, outcome: DeviceOutcome, proposals: Sequence[Proposal]) -> StepInputs:
    """`step` with the results that the one before it left on the device: tokens, drafts and first positions of rows."""
    rows, chosen = step.rows, list(step.chosen)
    token_ids, num_before = list(rows.token_ids), len(outcome.accepted)
    drafts: list[tuple[int, Sequence[int]]] = []
    chosen_at = {row: at for at, row in enumerate(step.sampling)}
    generated: list[DeviceIds] = []
    late = [row for row, origin in enumerate(step.followed) if origin < num_before]
    firsts = list(accumulate(rows.query_lens, initial=0))
    places, origins = [firsts[row] for row in late], [step.followed[row] for row in late]
    # Rows of one token each, without counts, need only that token.
    for row in late if len(late) < len(token_ids) or any(row.seen is not None for row in chosen) else ():
        origin, count, at = step.followed[row], rows.query_lens[row], chosen_at[row]
        first, end = firsts[row], firsts[row + 1]
        if count > 1:
            found = proposals[origin].drafts.truncated(count - 1)
            token_ids[first + 1 : end] = host_ids(found.token_ids)
            drafts.append((first + 1, found.token_ids))
            chosen[at] = chosen[at]._replace(drafts=found)
        seen = chosen[at].seen
        if seen is not None:
            generated = generated or outcome.generated()
            chosen[at] = chosen[at]._replace(seen=seen.after(generated[origin]))
    on_device = [*rows.device_tokens, *device_tokens(drafts), DeviceTokens(places, outcome.next_tokens, origins)]
    overshoot = None
    if outcome.rejected is not None:
        overshoot = outcome.rejected.index_select(0, to_device(np.array(step.followed), outcome.rejected.device))
    return step._replace(
        rows=replace(rows, token_ids=token_ids, device_tokens=on_device, overshoot=overshoot), chosen=chosen
    )


def drafting_rows(step: StepInputs, outcome: DeviceOutcome) -> list[DraftRow]:
    """`step.drafting`, all of whose rows reach their end, with the tokens of the step itself."""
    if all(row.seen is None for row in step.chosen):
        return step.drafting
    both = zip(step.drafting, step.chosen, outcome.generated(), strict=True)
    return [row if sample.seen is None else row._replace(seen=sample.seen.after(new)) for row, sample, new in both]


def of_rows(overshoot: Tensor | None, rows: list[int], count: int) -> Tensor | None:
    """The overshoot of these of `count` rows."""
    if overshoot is None or len(rows) == count:
        return overshoot
    return overshoot.index_select(0, to_device(np.array(rows), overshoot.device))


def _row_on_device(row: RowPlan, first_index: int) -> DraftRow:
    """The row of a step whose drafts the device makes, as if all drafts that it verifies were right."""
    request = row.request
    return DraftRow(
        request=request,
        tokens=range(row.end + 1),
        num_valid=row.end,
        num_draft_valid=row.end - row.num_drafts,
        max_drafts=row.max_new_drafts,
        block_table=request.blocks,
        sampled=row.samples,
        start=row.start,
        first_index=first_index,
        num_drafts=row.num_drafts,
        drafter=row.drafter,
    )


def _input_tokens(row: RowPlan) -> list[int]:
    if row.awaits_token:
        return [0] * row.num_tokens  # the device has them
    request = row.request
    tokens = request.tokens[row.start : row.end - row.num_drafts]
    return [*tokens, *host_ids(request.drafts.token_ids)] if row.num_drafts else tokens
