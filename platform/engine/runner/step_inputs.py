"""Inputs of a step: from its sequences when it is launched, and from the step before on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


class Prepared(NamedTuple):
    """Inputs of a step from its sequences. They may change while it runs, so nothing of them is read later but what
    never changes, and the tokens that bad words depend on: see `Request.reads_tokens`."""

    rows: SequenceRows
    handles: list[tuple[Any, int]]
    """(adapter, number of tokens)."""
    with_logits: list[int]
    """Places of the tokens whose logits are wanted."""
    chosen: list[SampleRow]
    """The rows that reach their end."""
    prompts: list[RowPlan | None]
    """By row: itself, if log-probabilities or hidden states of its prompt are wanted."""
    replayable: bool
    """Whether all rows are decodes or verifications, whose logits are captured too."""
    sampling: list[int]
    """The rows of `chosen`."""
    followed: list[int]
    """By row: the place of its sequence among the chosen rows of the step before, or their number where it is not
    awaiting a token. Empty: no row is."""
    drafting: list[DraftRow]
    """The rows, where the device drafts without the host; else empty."""


def prepare(plan: StepPlan, places: dict[Request, int], *, drafts: bool) -> Prepared:
    """Read a step's sequences. `places`: which of the chosen rows of the step before is whose; `drafts`: the device
    drafts without the host."""
    rows = SequenceRows([], [], [], [], prompt_lens=[row.request.num_prompt_tokens for row in plan.rows])
    replayable = all(row.samples and row.num_tokens == 1 + row.num_drafts for row in plan.rows)
    step = Prepared(rows, [], [], [], [], replayable, [], [], [])
    given: list[tuple[int, Sequence[int]]] = []
    for index, row in enumerate(plan.rows):
        request, first = row.request, len(rows.token_ids)
        end = first + row.num_tokens
        num_tokens = row.end - row.num_drafts if row.samples else len(request.tokens)
        rows.token_ids += _input_tokens(row)
        if row.num_drafts and not row.awaits_token:
            given.append((end - row.num_drafts, request.drafts.token_ids))
        rows.query_lens.append(row.num_tokens)
        rows.starts.append(row.start)
        rows.block_tables.append(request.blocks)
        if request.num_base_tokens <= row.start:
            step.handles.append((request.adapter, row.num_tokens))
        else:
            step.handles.extend(request.handles(row.start, row.num_tokens))
        if row.samples:
            step.with_logits.extend(range(end - 1 - row.num_drafts, end))
            seen = Seen(token_entries(request)) if request.counts_tokens else None
            step.chosen.append(SampleRow(request, NO_DRAFTS if row.awaits_token else request.drafts, num_tokens, seen))
            step.sampling.append(index)
        if drafts:
            step.drafting.append(_row_on_device(row, first))
        of_prompt = request.params.prompt_logprobs is not None or request.params.pooling is not None
        step.prompts.append(row if of_prompt and num_tokens == request.num_prompt_tokens else None)
    rows.device_tokens = device_tokens(given)
    if any(row.awaits_token for row in plan.rows):
        step.followed.extend(places[row.request] if row.awaits_token else len(places) for row in plan.rows)
    return step


def continued(step: Prepared, outcome: DeviceOutcome, proposals: Sequence[Proposal]) -> Prepared:
    """`step` with what the one before it left on the device: tokens, drafts, and where rows begin."""
    rows, chosen = step.rows, list(step.chosen)
    token_ids, places, origins = list(rows.token_ids), [], []
    drafts: list[tuple[int, Sequence[int]]] = []
    chosen_at = {row: at for at, row in enumerate(step.sampling)}
    generated: list[DeviceIds] = []
    end = 0
    for row, (origin, count) in enumerate(zip(step.followed, rows.query_lens, strict=True)):
        first, end = end, end + count
        if origin == len(outcome.accepted):
            continue
        places.append(first)
        origins.append(origin)
        at = chosen_at[row]
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


def drafting_rows(step: Prepared, outcome: DeviceOutcome) -> list[DraftRow]:
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
    request, known_end = row.request, row.end - row.num_drafts
    tokens = request.tokens[row.start : known_end]
    if row.awaits_token:
        return [0] * row.num_tokens  # the device has them
    return [*tokens, *host_ids(request.drafts.token_ids)] if row.num_drafts else tokens
