"""Verification in PyTorch, for all rows at once: the path of CPUs, and the reference of the kernel.

Bookkeeping is on the host, in numpy; tensors hold vocabulary-wide data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..noise import Stream, gumbel_argmax, row_keys, uniform
from ..sampling import most_likely

if TYPE_CHECKING:
    from . import Requests

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

GREEDY, INVARIANT, REJECTION = 0, 1, 2
"""Numbers of the rules in `Requests.rule`."""


def verify(logits: Tensor, draft_probs: Tensor | None, requests: Requests) -> tuple[Tensor, Tensor]:
    """`verification.verify` on any device."""
    request, drafts, draft_rows, first, _, rules, seeds, first_positions = (part.cpu().numpy() for part in requests[:8])
    request = np.maximum(request, 0)  # -1: padding, after all other rows
    rows, rule = np.arange(len(request)), rules[request]
    positions = first_positions[request] + rows - first[request]

    def keys(of: Ints, stream: Stream) -> Tensor:
        return row_keys(seeds[request[of]].tolist(), positions[of].tolist(), stream).to(logits.device)

    tokens = np.full(len(rows), -1)
    greedy, noisy, sampled = (np.flatnonzero(rule == number) for number in (GREEDY, INVARIANT, REJECTION))
    if len(greedy):
        tokens[greedy] = most_likely(_take(logits, greedy))[0]
    if len(noisy):
        scores = _take(logits, noisy)
        scores = scores - scores.amax(dim=-1, keepdim=True)
        tokens[noisy] = gumbel_argmax(scores, keys(noisy, Stream.TARGET)).cpu()
    right = (tokens == drafts) & (drafts >= 0)
    # The first row of each request whose draft is not accepted: its last row has none.
    place = np.minimum.reduceat(np.where(right, len(rows), rows), first)
    if len(sampled):
        p, q = _take(logits, sampled).softmax(dim=-1), _DraftProbs(draft_probs, drafts[sampled], draft_rows[sampled])
        starts = np.searchsorted(sampled, first[rules == REJECTION])
        weights, sums = _weights(p, q, starts)
        found = starts
        if requests.max_drafts:
            coins = uniform(keys(sampled, Stream.ACCEPT)).cpu().numpy()
            found = _last_accepted(p, q, weights, sums, coins, starts)
        there = place[rules == REJECTION] = sampled[found]
        residual = q.residual(p, weights, found, or_p=True)
        tokens[there] = gumbel_argmax(residual.log_(), keys(there, Stream.RESIDUAL)).cpu()
    before = rows < place[request]
    tokens[before] = drafts[before]
    tokens[rows > place[request]] = -1
    return torch.from_numpy(tokens).to(logits.device), torch.from_numpy(place - first).to(logits.device)


class _DraftProbs:
    """q of the rows of some requests."""

    def __init__(self, draft_probs: Tensor | None, drafts: Ints, draft_rows: Ints) -> None:
        """`drafts`, `draft_rows`: [n] as in `Requests`."""
        self.drafts = drafts
        self.has_probs = draft_rows >= 0
        self._probs, self._rows = draft_probs, draft_rows

    def of_drafts(self) -> Floats:
        """q(d) [n]; 1 for certain drafts, and in rows without one."""
        q, dense = np.ones(len(self.drafts), np.float32), self.has_probs
        if self._probs is not None:
            q[dense] = self._probs[self._rows[dense], self.drafts[dense]].cpu()
        return q

    def residual(self, p: Tensor, weights: Floats, rows: Ints, *, or_p: bool) -> Tensor:
        """max(w p - q, 0) [m, V] of `rows` [m]; p is [n, V] and w [n]; with `or_p` p itself if that is 0.
        May be p's memory if that is all of its rows."""
        p, drafts, draft_rows = _take(p, rows), self.drafts[rows], self._rows[rows]
        if (drafts < 0).all():
            return p
        residual = p * torch.from_numpy(np.where(drafts < 0, np.float32(1.0), weights[rows])).to(p.device)[:, None]
        dense, certain = np.flatnonzero(draft_rows >= 0), np.flatnonzero((draft_rows < 0) & (drafts >= 0))
        if self._probs is not None and len(dense):
            # If the drafter failed (q is NaN) its draft was rejected, whatever u; then the token is a draw from p.
            q = self._probs[draft_rows[dense]].nan_to_num_(0.0)
            residual.index_add_(0, torch.from_numpy(dense).to(p.device), q, alpha=-1)
        residual[certain, drafts[certain]] = 0.0
        residual.clamp_(min=0.0)
        return torch.where(residual.amax(dim=-1, keepdim=True) <= 0.0, p, residual) if or_p else residual


def _weights(p: Tensor, q: _DraftProbs, starts: Ints) -> tuple[Floats, Floats]:
    """(w [n], s [n]) of rows p [n, V] of requests that begin at `starts` [B]; s is NaN if it needs a sum of q."""
    of_target, of_drafter = p[np.arange(len(p)), np.maximum(q.drafts, 0)].cpu().numpy(), q.of_drafts()
    weights = np.ones(len(p), np.float32)
    rows = starts[q.drafts[starts] >= 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        while len(rows):
            reached = weights[rows] * of_target[rows]
            weights[rows + 1] = np.nan_to_num((reached > 0.0) * np.minimum(reached / of_drafter[rows], 1.0))
            rows = rows[q.drafts[rows + 1] >= 0] + 1
    sums = np.where(q.drafts < 0, weights, weights - np.append(weights[1:], 0.0))
    return weights, np.where(q.has_probs, np.nan, sums).astype(np.float32)


def _last_accepted(p: Tensor, q: _DraftProbs, weights: Floats, sums: Floats, coins: Floats, starts: Ints) -> Ints:
    """[B] the row after the last accepted draft of each request: the last one with u (1 - w + s) < s, or the first."""
    rows = np.arange(len(weights))
    sums[starts] = np.inf  # always accepted

    def last() -> Ints:
        with np.errstate(invalid="ignore"):
            passed = coins * (1.0 - weights + sums) < sums
        passed[starts] = True
        return np.maximum.reduceat(np.where(passed, rows, 0), starts)

    found = last()
    # Requests whose drafts are all accepted need no sums.
    asked = np.flatnonzero(np.isnan(sums) & (q.drafts[np.repeat(found, np.diff(starts, append=len(rows)))] >= 0))
    if not len(asked):
        return found
    got = q.residual(p, weights, asked, or_p=False).sum(dim=-1).cpu().numpy()
    sums[asked] = np.where(np.isnan(got), weights[asked], got)
    return last()


def _take(x: Tensor, rows: Ints) -> Tensor:
    """Some rows, ascending; no copy when they are all."""
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))
