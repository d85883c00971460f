"""Verification in PyTorch, one request after another: the reference of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..noise import Stream, gumbel_argmax, row_keys, uniform

if TYPE_CHECKING:
    from . import Requests


def verify(logits: Tensor, draft_probs: Tensor | None, requests: Requests) -> tuple[Tensor, Tensor]:
    """`verification.verify` on any device."""
    tokens = torch.full_like(requests.request, -1)
    accepted = torch.zeros_like(requests.num_drafts)
    columns = (requests.first_row, requests.num_drafts, requests.rule, requests.seed_keys, requests.first_position)
    for b, (first, k, rule, seed, position) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        rows = slice(first, first + k + 1)
        drafts, places = requests.draft_ids[rows], requests.draft_row[rows].tolist()
        if rule == 2:
            found = _reject(logits[rows], drafts.tolist()[:k], _q(draft_probs, places), seed, position)
        else:
            target = _target(logits[rows], seed, position, noisy=rule == 1)
            a = int((target == drafts).to(torch.int64).cumprod(0).sum())
            found = target[: a + 1].tolist()
        tokens[first : first + len(found)] = torch.tensor(found, device=tokens.device)
        accepted[b] = len(found) - 1
    return tokens, accepted


def _keys(seed: int, position: int, count: int, stream: Stream, like: Tensor) -> Tensor:
    return row_keys([seed] * count, range(position, position + count), stream).to(like.device)


def _q(draft_probs: Tensor | None, places: list[int]) -> list[Tensor | None]:
    """Distribution of each draft; that of a failed drafter (NaN) counts as without mass."""
    return [None if place < 0 or draft_probs is None else draft_probs[place] for place in places]


def _target(logits: Tensor, seed: int, position: int, noisy: bool) -> Tensor:
    """Choices of the target, [1 + k]."""
    if not noisy:
        return logits.argmax(dim=-1)
    keys = _keys(seed, position, len(logits), Stream.TARGET, logits)
    return gumbel_argmax(logits - logits.amax(dim=-1, keepdim=True), keys)


def _reject(logits: Tensor, drafts: list[int], q: list[Tensor | None], seed: int, position: int) -> list[int]:
    """Accepted drafts and the next token, by rejection sampling."""
    p = logits.softmax(dim=-1)
    coins = uniform(_keys(seed, position, len(logits), Stream.ACCEPT, logits)).tolist()
    a = 0
    while a < len(drafts):
        of_draft = q[a]
        if not coins[a] * (1.0 if of_draft is None else of_draft[drafts[a]].item()) < p[a, drafts[a]].item():
            break
        a += 1
    residual = p[a].clone()
    if a < len(drafts):
        of_draft = q[a]
        if of_draft is None:
            residual[drafts[a]] = 0.0
        else:
            residual = (residual - of_draft.nan_to_num(0.0)).clamp_(min=0.0)
    scores = (p[a] if residual.amax() <= 0.0 else residual).log()
    keys = _keys(seed, position + a, 1, Stream.RESIDUAL, logits)
    return [*drafts[:a], int(gumbel_argmax(scores[None], keys))]
