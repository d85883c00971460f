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

GREEDY, INVARIANT, REJECTION = 0, 1, 2
"""Numbers of the rules in `Requests.rule`."""


def verify(logits: Tensor, draft_probs: Tensor | None, requests: Requests) -> tuple[Tensor, Tensor]:
    """`verification.verify` on any device."""
    request, drafts, draft_rows, first, _, rules, seeds, first_positions = (part.cpu().numpy() for part in requests[:8])
    request = np.maximum(request, 0)  # -1: padding, behind all other rows
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
    if len(sampled):
        p = _take(logits, sampled).softmax(dim=-1)
        if requests.max_drafts:
            right[sampled] = _accepts(
                p, draft_probs, drafts[sampled], draft_rows[sampled], keys(sampled, Stream.ACCEPT)
            )
    # The first row of each request whose draft is not accepted: its last row has none.
    place = np.minimum.reduceat(np.where(right, len(rows), rows), first)
    if len(sampled):
        there = place[rules == REJECTION]
        p_there = _take(p, np.searchsorted(sampled, there))
        residual = _subtract_q(p_there, draft_probs, drafts[there], draft_rows[there])
        tokens[there] = gumbel_argmax(residual.log_(), keys(there, Stream.RESIDUAL)).cpu()
    before = rows < place[request]
    tokens[before] = drafts[before]
    tokens[rows > place[request]] = -1
    return torch.from_numpy(tokens).to(logits.device), torch.from_numpy(place - first).to(logits.device)


def _take(x: Tensor, rows: Ints) -> Tensor:
    """Some rows, ascending; no copy when they are all."""
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))


def _accepts(p: Tensor, draft_probs: Tensor | None, drafts: Ints, draft_rows: Ints, keys: Tensor) -> Any:
    """u q(d) < p(d) [n] for rows p [n, V] that decide about `drafts` d [n]; False if there is none (-1)."""
    q = np.ones(len(drafts), np.float32)
    dense = draft_rows >= 0
    if draft_probs is not None:
        q[dense] = draft_probs[draft_rows[dense], drafts[dense]].cpu()
    p_of_drafts = p[np.arange(len(drafts)), np.maximum(drafts, 0)].cpu().numpy()
    return (uniform(keys).cpu().numpy() * q < p_of_drafts) & (drafts >= 0)


def _subtract_q(p: Tensor, draft_probs: Tensor | None, drafts: Ints, draft_rows: Ints) -> Tensor:
    """max(p - q, 0) [n, V] for the rows' `drafts` [n]; p itself if there is none (-1), or nothing would be left."""
    if (drafts < 0).all():
        return p
    residual = p.clone()
    dense, certain = np.flatnonzero(draft_rows >= 0), np.flatnonzero((draft_rows < 0) & (drafts >= 0))
    if draft_probs is not None and len(dense):
        # If the drafter failed (q is NaN) its draft was rejected, whatever u; then the token is a draw from p.
        q = draft_probs[draft_rows[dense]].nan_to_num_(0.0)
        residual.index_add_(0, torch.from_numpy(dense).to(p.device), q, alpha=-1)
    residual[certain, drafts[certain]] = 0.0
    return torch.where(residual.amax(dim=-1, keepdim=True) <= 0.0, p, residual.clamp_(min=0.0))
