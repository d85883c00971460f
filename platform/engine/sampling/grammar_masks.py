"""Token masks of grammars on a step's logits, and drafts of tokens without a choice.

`mask_threads.py` makes both in a bounded time. If a sequence's mask is not ready by then, it gets no token in this step
and its row is computed again; if only those after its drafts are not, it gets fewer tokens. Its text is the same.

R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....kernels.staging import to_device
from ...core.request import Drafts, Request
from .grammar_state import MAX_FORCED, GrammarState
from .mask_threads import MaskJob

if TYPE_CHECKING:
    from .logits_edits import LogitsRow

STEP_SECONDS = 0.012
"""Most time of a step that masks may take; one takes 0.02 to 2 ms in usual grammars."""
DRAFT_SECONDS = 0.002
"""Most time for masks of one draft of a drafter; without a mask it may draft a token that does not fit."""
FORCED_SECONDS = 0.006
"""Most time of a step that the search for tokens without a choice may take."""
STEP_FORCED = 64
"""Most tokens without a choice that a step verifies for all sequences: more would make it longer for the others."""


def mask_logits(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Set the logits of tokens that do not fit to -inf, in place, in these rows of `logits` [R, V]; all of them in rows
    of the target without a mask. Sequences whose first row has none are `GrammarState.is_deferred` then."""
    masks = np.zeros((len(rows), -(-logits.shape[1] // 8)), np.uint8)
    indices = _fill(rows, masks)
    if logits.device.type == "cpu":
        for index, mask in zip(indices, masks, strict=True):
            _mask_row(logits[index], mask)
        return
    packed = torch.from_numpy(masks).to(logits.device)
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    chosen = to_device(np.array(indices), logits.device)
    logits[chosen] = logits[chosen].masked_fill_(forbidden, float("-inf"))


def _fill(rows: Sequence[LogitsRow], masks: np.ndarray) -> list[int]:
    """Write the rows' masks into `masks` [R, ceil(V / 8)], sequence by sequence; returns their rows of the logits."""
    of_requests: dict[int, list[LogitsRow]] = {}
    for row in rows:
        of_requests.setdefault(id(row.request), []).append(row)
    asked: list[tuple[GrammarState, list[int], list[int]]] = []
    indices: list[int] = []
    for own in of_requests.values():
        own.sort(key=lambda row: row.num_drafts)
        indices += [row.place for row in own]
        asked.append((own[0].request.grammar, _generated(own[0].request), [*chain.from_iterable(own[-1].drafts)]))
    is_draft = rows[0].is_draft
    jobs = [MaskJob(state, partial(state.fill, tokens, drafts)) for state, tokens, drafts in asked]
    asked[0][0].threads.run(jobs, DRAFT_SECONDS if is_draft else STEP_SECONDS)
    start = 0
    for (state, tokens, drafts), own in zip(asked, of_requests.values(), strict=True):
        ready = [] if state.is_busy else state.masks(tokens, drafts)
        for target, row in zip(masks[start : start + len(own)], own, strict=True):
            if row.num_drafts < len(ready):
                mask = ready[row.num_drafts]
                common = min(len(target), len(mask))
                target[:common] = mask[:common]
            elif is_draft:  # a draft that does not fit is rejected
                target[:] = 255
        if not is_draft:
            state.is_deferred = not ready and not state.problem
            state.num_deferred = state.num_deferred + 1 if state.is_deferred else 0
        start += len(own)
    return indices


def _generated(request: Request) -> list[int]:
    return request.tokens[request.num_prompt_tokens :]


_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_LIMITS = _LIMITS.astype(np.float32)
"""Largest logits [256, 8] of the tokens of a mask's byte."""


def _mask_row(logits: Tensor, mask: np.ndarray) -> None:
    """Set the logits [V] float32 of tokens that do not fit to -inf, in place."""
    values = logits.numpy()
    np.minimum(values, _LIMITS.take(mask, axis=0).reshape(-1)[: len(values)], out=values)


def with_forced(requests: Sequence[Request], drafts: Sequence[Drafts]) -> list[Drafts]:
    """Drafts of sequences that follow grammars: those of the drafter, or the tokens without a choice, if the drafter
    has not proposed just these."""
    most = min(MAX_FORCED, STEP_FORCED // max(1, len(requests)))
    jobs = {
        index: MaskJob(request.grammar, partial(request.grammar.forced, _generated(request), most))
        for index, request in enumerate(requests)
        if most and request.params.max_drafts != 0
    }
    if jobs:
        requests[0].grammar.threads.run([*jobs.values()], FORCED_SECONDS)
    found = list(drafts)
    for index, job in jobs.items():
        forced = job.result if job.is_done else None
        if forced and list(drafts[index].token_ids[: len(forced)]) != forced:
            found[index] = Drafts(forced, forced=True)
    return found
