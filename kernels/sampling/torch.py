"""Sampling filters in PyTorch.

min-p, top-k and top-p each keep the logits above some value. So each filter finds a threshold for each row, and the row
is then masked. Top-k and top-p look for it among the few largest logits (`topk`): sorting a vocabulary costs ten times
as much. Results do not depend on the number of candidates, and so not on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Candidates for the nucleus, tried in order; a row whose nucleus is larger still is sorted in full.
_NUCLEUS_CANDIDATES = (64, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of R rows, [R] each on the host; the neutral value means that the row has no such limit."""

    top_k: np.ndarray
    """int64; neutral 0."""
    top_p: np.ndarray
    """float64; neutral 1."""
    min_p: np.ndarray
    """float64; neutral 0."""

    @property
    def rows(self) -> np.ndarray:
        """Indices of the rows that have a limit."""
        return np.flatnonzero((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))

    def take(self, rows: np.ndarray) -> Limits:
        """Limits of some rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _to(values: np.ndarray, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=like.device, dtype=dtype)


def divide(logits: Tensor, heat: np.ndarray) -> Tensor:
    """Quotient logits / heat row by row: a new tensor [R, V]."""
    return logits / _to(heat, logits, torch.float32).unsqueeze(1)


def apply_limits(logits: Tensor, limits: Limits, in_place: bool) -> Tensor:
    """Apply the limits of the rows to [R, V] logits; mutates `logits` if `in_place`, else a copy."""
    rows = limits.rows
    if rows.size == logits.shape[0]:
        out = logits if in_place else logits.clone()
        _mask_(out, limits)
        return out
    index = _to(rows, logits, torch.int64)
    part = logits.index_select(0, index)
    _mask_(part, limits.take(rows))
    return (logits if in_place else logits.clone()).index_copy_(0, index, part)


def _mask_(logits: Tensor, limits: Limits) -> None:
    """Mask [R, V] logits, which are mutated; each row has a limit."""
    threshold: Tensor | None = None
    if (limits.min_p > 0.0).any():
        log_min_p = np.where(limits.min_p > 0.0, np.log(np.maximum(limits.min_p, 1e-300)), -math.inf)
        threshold = logits.amax(dim=-1) + _to(log_min_p, logits, torch.float32)
    if (limits.top_k > 0).any():
        kth = _kth_largest(logits, limits.top_k)
        threshold = kth if threshold is None else torch.maximum(threshold, kth)
    if threshold is not None:
        logits.masked_fill_(logits < threshold.unsqueeze(1), -math.inf)
    rows = np.flatnonzero(limits.top_p < 1.0)
    if rows.size == logits.shape[0]:
        _top_p_(logits, limits.top_p)
    elif rows.size:
        index = _to(rows, logits, torch.int64)
        part = logits.index_select(0, index)
        _top_p_(part, limits.top_p[rows])
        logits.index_copy_(0, index, part)


def _kth_largest(logits: Tensor, top_k: np.ndarray) -> Tensor:
    """k-th largest logit of each row, [R]; -inf if k is 0."""
    largest = logits.topk(int(top_k.max()), dim=-1).values
    k = _to(top_k, logits, torch.int64).unsqueeze(1)
    kth = largest.gather(1, (k - 1).clamp_(min=0))
    return kth.masked_fill_(k == 0, -math.inf).squeeze(1)


class _Nucleus(NamedTuple):
    """Ends of the rows' nuclei; all [R]."""

    threshold: Tensor
    """Smallest logit in the nucleus, float32."""
    num_equal: Tensor
    """Number of tokens in the nucleus with exactly that logit, int64."""
    tied: Tensor
    """Bool: further tokens have exactly that logit."""
    found: Tensor
    """Bool: the candidates sufficed."""


def _nucleus(logits: Tensor, probs: Tensor, mass: Tensor, count: int) -> _Nucleus:
    """Nucleus of each row, from its `count` largest logits: a token is in it when the mass before the token is below
    `mass` [R]."""
    whole = count == logits.shape[1]
    ordered, ids = logits.sort(dim=-1, descending=True) if whole else logits.topk(count, dim=-1)
    # The sum is in order and in float64: a prefix has the same sum whatever follows it.
    chosen = probs.gather(1, ids).to(torch.float64)
    before = chosen.cumsum(dim=-1).sub_(chosen)
    # The softmax of a row without mass (all -inf, or not finite) is NaN: the row stays as it is.
    size = (before < mass.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    threshold = ordered.gather(1, size - 1)
    first_out = ordered.gather(1, size.clamp(max=count - 1))
    inside = torch.arange(count, device=logits.device) < size
    is_cut = size < count
    return _Nucleus(
        threshold=threshold.squeeze(1),
        num_equal=((ordered == threshold) & inside).sum(dim=-1),
        tied=(is_cut & (first_out == threshold)).squeeze(1),
        found=is_cut.squeeze(1) | whole,
    )


def _top_p_(logits: Tensor, top_p: np.ndarray) -> None:
    """Mask [R, V] logits to the nucleus of each row; mutated."""
    num_tokens = logits.shape[1]
    probs = logits.softmax(dim=-1)
    mass = _to(top_p, logits, torch.float64)
    counts = [*(count for count in _NUCLEUS_CANDIDATES if count < num_tokens), num_tokens]
    nucleus = _nucleus(logits, probs, mass, counts[0])
    for count in counts[1:]:
        wide = (~nucleus.found).nonzero().squeeze(1)
        if not wide.numel():
            break
        again = _nucleus(logits[wide], probs[wide], mass[wide], count)
        nucleus = _Nucleus(*(old.index_copy(0, wide, new) for old, new in zip(nucleus, again, strict=True)))
    outside = logits < nucleus.threshold.unsqueeze(1)
    tied = nucleus.tied.nonzero().squeeze(1)
    if tied.numel():
        equal = logits[tied] == nucleus.threshold[tied].unsqueeze(1)
        surplus = equal & (equal.cumsum(dim=-1) > nucleus.num_equal[tied].unsqueeze(1))
        outside[tied] |= surplus
    logits.masked_fill_(outside, -math.inf)


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sampling.top_logprobs` on any device."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = chosen.unsqueeze(1)
    rank = (logits > logits.gather(1, chosen)).sum(dim=-1).add_(1)
    # Sorted by id first, then stably by logit: equal logits are in the order of their ids.
    ids = logits.topk(k, dim=-1).indices.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    return ids, logprobs.gather(1, ids), logprobs.gather(1, chosen).squeeze(1), rank


def row_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`sampling.row_stats` on any device."""
    top = logits.amax(dim=-1)
    return top, (logits - top.unsqueeze(1)).exp_().sum(dim=-1)


def logprobs_at(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`sampling.logprobs_at` on any device."""
    given = logits.gather(1, ids)
    # One id at a time: a comparison of all at once would take their number times the memory of the logits.
    ranks = [(logits > given[:, index : index + 1]).sum(dim=-1).add_(1) for index in range(ids.shape[1])]
    return logits.log_softmax(dim=-1).gather(1, ids), torch.stack(ranks, dim=1) if ranks else ids.clone()
