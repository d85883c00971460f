"""Sampling filters in plain torch.

min-p, top-k and top-p all keep what reaches some logit; so each only finds a threshold per row, and a masking follows.
Top-k and top-p find theirs among a few largest logits (`topk`): sorting a vocabulary costs ten times as much.
Results do not depend on how many candidates were looked at, so they do not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Candidates for the nucleus, as many as are needed; a row whose nucleus is larger still is sorted in full.
_NUCLEUS_CANDIDATES = (64, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Limits:
    """Host-side [R] each; the neutral value means that the row has no such limit."""

    top_k: np.ndarray
    """int64; neutral 0."""
    top_p: np.ndarray
    """float64; neutral 1."""
    min_p: np.ndarray
    """float64; neutral 0."""

    @property
    def rows(self) -> np.ndarray:
        """Indices of the rows with any limit."""
        return np.flatnonzero((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))

    def take(self, rows: np.ndarray) -> Limits:
        """The limits of some rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _to(values: np.ndarray, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=like.device, dtype=dtype)


def divide(logits: Tensor, heat: np.ndarray) -> Tensor:
    """logits / heat by rows: a new [R, V]."""
    return logits / _to(heat, logits, torch.float32).unsqueeze(1)


def apply_limits(logits: Tensor, limits: Limits, in_place: bool) -> Tensor:
    """Mask [R, V] logits by the limits of their rows; into `logits` or a copy."""
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
    """Mask [R, V] in place: each row has some limit."""
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
    """[R] the k-th largest logit of each row; -inf where k is 0."""
    largest = logits.topk(int(top_k.max()), dim=-1).values
    k = _to(top_k, logits, torch.int64).unsqueeze(1)
    kth = largest.gather(1, (k - 1).clamp_(min=0))
    return kth.masked_fill_(k == 0, -math.inf).squeeze(1)


class _Nucleus(NamedTuple):
    """Where each row's nucleus ends; all [R]."""

    threshold: Tensor
    """Smallest logit in it, float32."""
    num_equal: Tensor
    """How many tokens with exactly that logit belong to it, int64."""
    tied: Tensor
    """Whether further tokens have exactly that logit, bool."""
    found: Tensor
    """Whether the candidates were enough to tell, bool."""


def _nucleus(logits: Tensor, probs: Tensor, mass: Tensor, count: int) -> _Nucleus:
    """Each row's nucleus from its `count` largest logits: a token is in when the mass before it is below `mass` [R]."""
    whole = count == logits.shape[1]
    ordered, ids = logits.sort(dim=-1, descending=True) if whole else logits.topk(count, dim=-1)
    # In order and in float64: the sum over a prefix is the same whatever comes after it.
    chosen = probs.gather(1, ids).to(torch.float64)
    before = chosen.cumsum(dim=-1).sub_(chosen)
    # A row without mass (all -inf, or not finite) has a softmax of NaN: it keeps what it has.
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
    """Mask [R, V] in place to the nucleus of each row."""
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
    """See the package."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = chosen.unsqueeze(1)
    rank = (logits > logits.gather(1, chosen)).sum(dim=-1).add_(1)
    # By id first, then stably by logit: equal ones in the order of their ids.
    ids = logits.topk(k, dim=-1).indices.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    return ids, logprobs.gather(1, ids), logprobs.gather(1, chosen).squeeze(1), rank


def row_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    top = logits.amax(dim=-1)
    return top, (logits - top.unsqueeze(1)).exp_().sum(dim=-1)
