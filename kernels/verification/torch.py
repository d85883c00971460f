"""Verification in PyTorch: the CPU's way, and the reference of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..noise import Stream, gumbel_argmax, row_keys, uniform
from ..staging import to_device

if TYPE_CHECKING:
    from . import Requests


def verify(logits: Tensor, draft_probs: Tensor | None, requests: Requests) -> tuple[Tensor, Tensor]:
    """`verification.verify` on any device, for requests without padding."""
    request, draft_ids = requests.request, requests.draft_ids
    index = torch.arange(len(request), device=request.device) - requests.first_row[request]
    seeds = requests.seed_keys[request].tolist()
    positions = (requests.first_position[request] + index).tolist()
    rule = requests.rule[request].cpu().numpy()
    right = torch.zeros_like(request, dtype=torch.bool)
    chosen = torch.empty_like(request)
    coupled, sampled = np.flatnonzero(rule != 2).tolist(), np.flatnonzero(rule == 2).tolist()
    if coupled:
        picked = [seeds[i] for i in coupled], [positions[i] for i in coupled]
        tokens = target_tokens(_rows(logits, coupled), *picked, rule[coupled] == 0)
        chosen[coupled] = tokens
        right[coupled] = tokens == draft_ids[coupled]
    if sampled:
        p = _rows(logits, sampled).softmax(dim=-1)
        drafts, places = draft_ids[sampled], requests.draft_row[sampled]
        q_of_draft = torch.ones(len(sampled), device=p.device)
        if draft_probs is not None:
            drawn = (places >= 0).nonzero()[:, 0]
            q_of_draft[drawn] = draft_probs[places[drawn], drafts[drawn]]
        keys = row_keys([seeds[i] for i in sampled], [positions[i] for i in sampled], Stream.ACCEPT).to(p.device)
        p_of_draft = p.gather(1, drafts.clamp(min=0)[:, None])[:, 0]
        right[sampled] = (drafts >= 0) & (uniform(keys) * q_of_draft < p_of_draft)
    table = request.new_zeros(len(requests.rule), requests.max_drafts + 1)
    table[request, index] = right.to(torch.int64)
    accepted = table.cumprod(dim=1).sum(dim=1)
    if sampled:
        last = (requests.first_row + accepted)[requests.rule == 2]
        at = last.tolist()
        keys = row_keys([seeds[i] for i in at], [positions[i] for i in at], Stream.RESIDUAL).to(p.device)
        p_last = p[torch.searchsorted(torch.tensor(sampled, device=p.device), last)]
        scores = _residual(p_last, draft_probs, draft_ids[last], requests.draft_row[last]).log_()
        chosen[last] = gumbel_argmax(scores, keys)
    ends = accepted[request]
    return torch.where(index < ends, draft_ids, chosen.masked_fill_(index > ends, -1)), accepted


def target_tokens(logits: Tensor, seed_keys: Sequence[int], positions: Sequence[int], greedy: np.ndarray) -> Tensor:
    """Choices of the target [R]: argmax(logits) where `greedy`, argmax(logits + noise) elsewhere.

    Logits are shifted to a maximum of zero, so that float32 resolves the noise next to them.
    """
    if greedy.all():
        return logits.argmax(dim=-1)
    noisy = np.flatnonzero(~greedy).tolist()
    scores = _rows(logits, noisy)
    keys = row_keys([seed_keys[i] for i in noisy], [positions[i] for i in noisy], Stream.TARGET).to(logits.device)
    tokens = gumbel_argmax(scores - scores.amax(dim=-1, keepdim=True), keys)
    if len(noisy) == len(logits):
        return tokens
    return logits.argmax(dim=-1).index_copy_(0, to_device(np.array(noisy), logits.device), tokens)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some of the rows, in order; no copy when these are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _residual(p: Tensor, draft_probs: Tensor | None, drafts: Tensor, places: Tensor) -> Tensor:
    """max(p - q, 0) [B, V], or p where that is empty, or where no draft was rejected (-1 in `drafts`)."""
    residual = p.clone()
    if draft_probs is not None:
        drawn = (places >= 0).nonzero()[:, 0]
        # Where the drafter failed (q is NaN) its draft was rejected, whatever u; then the token is a draw from p.
        residual[drawn] = (p[drawn] - draft_probs[places[drawn]].nan_to_num_(0.0)).clamp_(min=0.0)
    certain = ((places < 0) & (drafts >= 0)).nonzero()[:, 0]
    residual[certain, drafts[certain]] = 0.0
    return torch.where(residual.amax(dim=-1, keepdim=True) <= 0.0, p, residual)
