"""From logits to tokens: edits, filters, and the verification of drafts, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.sampling import filter_logits, top_logprobs
from ...spec_decode.verification import VerifyRow, choose_rule, verify
from ..core.errors import ErrorInfo, InvalidRequestError
from ..core.messages import TokenLogprobs
from ..core.request import Drafts, Request
from .logits_edits import LogitsRow, apply_edits, wants_edits


class SampleRow(NamedTuple):
    """One sequence's 1 + k rows of the logits: after its tokens, and after each of the k drafts."""

    request: Request
    drafts: Drafts


class Sampled(NamedTuple):
    """What one sequence got."""

    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None


NO_CHOICE = InvalidRequestError("the sampling parameters leave no token to choose", param="allowed_token_ids")


class Sampler:
    """Chooses tokens. Holds no state of requests: noise comes from counters, edits from the tokens themselves."""

    def __init__(self, *, always_invariant: bool = False) -> None:
        self._always_invariant = always_invariant

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Sample and verify.

        Args:
            logits: [sum(1 + k), V] float32, raw; may be overwritten.
            rows: the sequences in the order of their logits rows.
        """
        starts = _starts(rows)
        wanting = [i for i, row in enumerate(rows) if row.request.params.logprobs is not None]
        raw = self._keep_raw(logits, rows, starts, wanting)
        stuck = self._edit(logits, rows, starts)
        filtered = self._filter(logits, rows)
        verified = verify(filtered, [self._verify_row(row) for row in rows])
        sampled = [Sampled(tokens, accepted) for tokens, accepted in verified]
        for i in wanting:
            request, tokens = rows[i].request, sampled[i].token_ids
            sampled[i] = sampled[i]._replace(
                logprobs=token_logprobs(raw[i][: len(tokens)], tokens, request.params.logprobs or 0)
            )
        for i in stuck:
            sampled[i] = Sampled([], 0, error=NO_CHOICE.info())
        return sampled

    def _keep_raw(
        self, logits: Tensor, rows: Sequence[SampleRow], starts: list[int], wanting: list[int]
    ) -> dict[int, Tensor]:
        """Copies of the raw logits of sequences that want log-probabilities: edits and filters work in place."""
        return {i: logits[starts[i] : starts[i] + 1 + len(rows[i].drafts.token_ids)].clone() for i in wanting}

    def _edit(self, logits: Tensor, rows: Sequence[SampleRow], starts: list[int]) -> list[int]:
        """Apply the edits in place; returns the sequences (by index) that have a row without any allowed token."""
        edited, owner = [], []
        for i, row in enumerate(rows):
            if wants_edits(row.request.params):
                drafts = row.drafts.token_ids
                edited += [LogitsRow(starts[i] + j, row.request, drafts[:j]) for j in range(len(drafts) + 1)]
                owner += [i] * (len(drafts) + 1)
        if not edited:
            return []
        apply_edits(logits, edited)
        index = torch.tensor([row.place for row in edited], device=logits.device)
        empty = torch.isneginf(logits[index].amax(dim=-1)).tolist()
        # Only a row that is surely reached counts: later ones may follow a draft that is not accepted.
        return [i for i, row, is_empty in zip(owner, edited, empty, strict=True) if is_empty and not row.drafts]

    def _filter(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        params = [row.request.params for row in rows for _ in range(len(row.drafts.token_ids) + 1)]
        if all(p.greedy for p in params):
            return logits
        return filter_logits(
            logits,
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        )

    def _verify_row(self, row: SampleRow) -> VerifyRow:
        request = row.request
        rule = choose_rule(request, self._always_invariant)
        return VerifyRow(request.seed_key, len(request.tokens), row.drafts.token_ids, row.drafts.probs, rule)


def _starts(rows: Sequence[SampleRow]) -> list[int]:
    starts, total = [], 0
    for row in rows:
        starts.append(total)
        total += 1 + len(row.drafts.token_ids)
    return starts


def token_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [R] and of the `k` most likely tokens under raw `logits` [R, V]."""
    chosen = torch.tensor(tokens, device=logits.device)
    ids, values, own, rank = (part.tolist() for part in top_logprobs(logits, chosen, k))
    return [TokenLogprobs([token, *ids[i]], [own[i], *values[i]], rank[i]) for i, token in enumerate(tokens)]
