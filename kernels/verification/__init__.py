"""Verification of drafts on the device: ragged requests of all three rules in one launch, without the host.

Request b has k_b drafts and 1 + k_b rows of logits; row j is the distribution p_j after j drafts.

    greedy:     t_j = argmax_v logits_j[v]
    invariant:  t_j = argmax_v (logits_j[v] - max logits_j) + G_j[v]         G_j: noise, (seed, position + j, TARGET)
                accept draft j while t_j = d_j;  next token t_a
    rejection:  w_0 = 1,  w_(j+1) = min(1, w_j p_j(d_j) / q_j(d_j)),  s_j = sum_v max(w_j p_j - q_j, 0)[v],  q_k = 0
                a: the largest j with u_j (1 - w_j + s_j) < s_j, or 0        u_j: uniform, (seed, round + j, ACCEPT)
                next token argmax_v log max(w_a p_a - q_a, 0)[v] + G_a[v]    G_a: noise, (seed, round + a, RESIDUAL)
                p_a instead if w_a p_a - q_a has no positive part            round = position * noise.ROUND

a is the number of accepted drafts. Sources: see `spec_decode/verify/verification.py`. A row that no token may follow
(p_j is NaN) ends its drafts: s_j = w_j. A quotient that is NaN is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor, device, float32

from ..device_outcome import device_tokens, host_ids
from ..dispatch import use_triton
from ..noise import ROUND
from ..staging import upload

# In this package the name `torch` is the module next to this file: `import torch` here would hide it.
from . import torch as _reference
from .torch import GREEDY, INVARIANT, REJECTION

NO_TOKEN = -1


class Requests(NamedTuple):
    """B requests with R rows of logits in all, on the device, int64. Rows with `request` -1 are padding."""

    request: Tensor
    """[R] request of each row."""
    draft_ids: Tensor
    """[R] draft that the row decides about; -1 in a request's last row."""
    draft_row: Tensor
    """[R] row of the draft's distribution in `draft_probs`; -1: the draft is certain, q is one-hot."""
    first_row: Tensor
    """[B]"""
    num_drafts: Tensor
    """[B]"""
    rule: Tensor
    """[B]"""
    seed_keys: Tensor
    """[B]"""
    first_position: Tensor
    """[B] position in the noise of the request's first row: the index in the sequence of the token that it decides,
    times `position_step`."""
    max_drafts: int
    """Upper bound of `num_drafts`."""
    sampled: bool
    """True when any request may be sampled: greedy requests need no statistics of their rows."""


def pack(
    drafts: Sequence[Sequence[int]],
    certain: Sequence[bool],
    rules: Sequence[int],
    seed_keys: Sequence[int],
    first_positions: Sequence[int],
    target: device,
) -> Requests:
    """Describe B requests (all arguments are [B], on the host) in one upload, for which the host does not wait.

    `certain`: the request's drafts have no distributions; the distributions of other requests follow each other in
    `draft_probs`.
    """
    k = np.array([len(ids) for ids in drafts], dtype=np.int64)
    request = np.repeat(np.arange(len(k)), k + 1)
    first_row = np.cumsum(k + 1) - (k + 1)
    is_draft = np.arange(len(request)) - first_row[request] < k[request]
    draft_ids = np.full(len(request), NO_TOKEN, dtype=np.int64)
    draft_ids[is_draft] = [token for ids in drafts for token in host_ids(ids)]
    has_probs = is_draft & ~np.asarray(certain, dtype=bool)[request]
    draft_row = np.where(has_probs, np.cumsum(has_probs) - 1, -1)
    mask = (1 << 64) - 1
    seeds = np.array([seed & mask for seed in seed_keys], dtype=np.uint64).view(np.int64)
    first_position = np.asarray(first_positions) * [position_step(rule) for rule in rules]
    columns = (request, draft_ids, draft_row, first_row, k, np.asarray(rules), seeds, first_position)
    there = upload(target, *(column.astype(np.int64) for column in columns))
    for tokens in device_tokens(zip(first_row.tolist(), drafts, strict=True)):
        tokens.fill(there[1])
    return Requests._make([*there, max(k.tolist(), default=0), any(rule != GREEDY for rule in rules)])


def position_step(rule: int) -> int:
    """Positions in the noise between two tokens of the sequence, for a rule."""
    return ROUND if rule == REJECTION else 1


@lru_cache(256)
def greedy_rows(count: int, target: device) -> Requests:
    """`pack` of `count` greedy requests without drafts: the same for all such requests, so it is uploaded once."""
    return pack([()] * count, [True] * count, [GREEDY] * count, [0] * count, [0] * count, target)


def verify(
    logits: Tensor,
    draft_probs: Tensor | None,
    requests: Requests,
    stats: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the next tokens of all requests.

    Args:
        logits: [R, V] float32 after every sampling parameter. Not changed. A row without a finite maximum has an
        arbitrary token.
        draft_probs: [N, V] float32, what the drafts that are not certain were drawn from; None: there are none.
        stats: `kernels.sampling.row_stats` of `logits`, if the caller has them; not needed for greedy requests.

    Returns:
        (tokens [R] int64: in a request's rows its accepted drafts, the next token, and NO_TOKEN after it;
        num_accepted [B] int64), on the device of `logits`.

    Raises:
        ValueError: shapes or types do not fit.
    """
    num_rows = requests.request.shape[0]
    if logits.dtype != float32 or logits.ndim != 2 or logits.shape[0] != num_rows:
        raise ValueError(f"logits must be float32 [{num_rows}, V], got {logits.dtype} {list(logits.shape)}")
    if draft_probs is not None and (draft_probs.dtype != float32 or draft_probs.shape[1:] != logits.shape[1:]):
        raise ValueError(f"draft_probs must be float32 [N, {logits.shape[1]}], got {list(draft_probs.shape)}")
    if use_triton(logits):
        from . import triton as _triton

        return _triton.verify(logits, draft_probs, requests, stats)
    return _reference.verify(logits, draft_probs, requests)


__all__ = ["GREEDY", "INVARIANT", "NO_TOKEN", "REJECTION", "Requests", "greedy_rows", "pack", "position_step", "verify"]
