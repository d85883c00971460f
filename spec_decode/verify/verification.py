"""Verification of drafts: two lossless rules. The output has the target's distribution with any drafter.

Drafter-invariant (greedy and seeded requests): the token at position i is argmax(log p_i + G_i), where the noise G_i is
a function of the request's seed, i and the token id alone; a draft is right when it is that token. So the text, not
just its distribution, is the same for every drafter and every k. A drafter that draws with the same noise from its own
q is right with probability >= (1 - TV(p, q)) / (1 + TV(p, q)).
    Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".

Rejection sampling (the rest), of all drafts d_j ~ q_j of a request together. With w_0 = 1 and w_(j+1) = min(1, w_j
p_j(d_j) / q_j(d_j)), accept the largest number a of drafts that passes a test; then draw from norm(max(w_a p_a - q_a,
0)), or, when all are accepted, from p. In expectation no fewer drafts are accepted than token by token (Leviathan,
Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding"). One draft is right with
probability 1 - TV. Certain drafts (q is one-hot): the first j are right with probability w_j under both rules.
    Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), algorithm 2.
Against token by token, with the p, q and drafts of runs at temperature 1, tokens of a verification rose by 0.7% (4
drafts) and 1.0% (8) with the demo's draft model, of which 1.3 and 1.4 were right, and by 1.6% and 3.6% with
SmolLM2-135M drafted by its own int4 weights, of which 3.6 and 6.6 were.

A request with k drafts brings 1 + k rows of logits: row j is the distribution p of the token after j drafts, after
every sampling parameter (penalties at row j count the drafts before j). Rows of requests with different k and different
rules are concatenated; all are computed at once (`kernels/verification`) and read back once. On a GPU that is one
launch, which `choose` makes without waiting for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels import verification as kernel
from ...kernels.staging import to_device
from ...platform.core.request import Request


class Rule(enum.Enum):
    """Rule by which a request's tokens are chosen and its drafts verified."""

    GREEDY = "greedy"
    """The most likely token; the drafter-invariant rule without noise."""
    INVARIANT = "invariant"
    """Drafter-invariant, sampled."""
    REJECTION = "rejection"


def choose_rule(request: Request, invariant: bool) -> Rule:
    """The rule for `request`; `invariant`: the engine uses the drafter-invariant rule for all requests."""
    if request.params.greedy:
        return Rule.GREEDY
    return Rule.INVARIANT if invariant or request.deterministic else Rule.REJECTION


class VerifyRow(NamedTuple):
    """One request in a verification."""

    seed_key: int
    first_position: int
    """Index in the sequence of the token that row 0 decides: the length of the accepted sequence."""
    draft_ids: Sequence[int]
    draft_probs: Tensor | None
    """[k, V] float32: the distribution that each draft was drawn from, for `Rule.REJECTION`; None: drafts are certain,
    q is one-hot."""
    rule: Rule


class Verified(NamedTuple):
    """Result of a verification for one request."""

    token_ids: list[int]
    """The accepted drafts and one more token."""
    num_accepted: int


_RULES = {
    Rule.GREEDY: kernel.GREEDY,
    Rule.INVARIANT: kernel.INVARIANT,
    Rule.REJECTION: kernel.REJECTION,
}


def verify(logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
    """Choose the next tokens of every request, with or without drafts.

    Args:
        logits: [sum(1 + k_i), V] float32 after every sampling parameter (`filter_logits` last), the rows' in order.
            A row without a finite maximum has no valid token: the caller must cut the result there.
        rows: the requests; k_i = len(draft_ids) may be 0.

    Returns:
        one `Verified` for each of `rows`: between 1 and 1 + k_i tokens.

    Raises:
        ValueError: the number of logits rows does not fit.
    """
    num_positions = sum(1 + len(row.draft_ids) for row in rows)
    if num_positions != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {num_positions} positions")
    if not rows:
        return []
    host = torch.cat(choose(logits, rows)).tolist()  # the only transfer
    return as_verified(rows, host[:num_positions], host[num_positions:])


class Choices(NamedTuple):
    """Tokens chosen for B requests with R rows, on the device; the host has not waited for them."""

    token_ids: Tensor
    """[R] int64: in a request's rows its accepted drafts, the next token, and -1 after it."""
    num_accepted: Tensor
    """[B] int64"""


def choose(
    logits: Tensor,
    rows: Sequence[VerifyRow],
    stats: tuple[Tensor, Tensor] | None = None,
    overshoot: Tensor | None = None,
) -> Choices:
    """`verify` without waiting for the device.

    Args:
        logits, rows: those of `verify`; at least one row.
        stats: `row_stats` of `logits`, if the caller has them.
        overshoot: [B] int64 on the device: by how much the rows' `first_position` is too large; None: 0.
    """
    probs = [
        row.draft_probs
        for row in rows
        if row.rule is Rule.REJECTION and row.draft_probs is not None and len(row.draft_ids) > 0
    ]
    requests = kernel.pack(
        drafts=[row.draft_ids for row in rows],
        certain=[row.rule is not Rule.REJECTION or row.draft_probs is None for row in rows],
        rules=[_RULES[row.rule] for row in rows],
        seed_keys=[row.seed_key for row in rows],
        first_positions=[row.first_position for row in rows],
        target=logits.device,
    )
    if overshoot is not None:
        steps = [kernel.position_step(_RULES[row.rule]) for row in rows]
        if max(steps) > 1:
            overshoot = overshoot * to_device(np.array(steps), overshoot.device)
        requests.first_position.sub_(overshoot)
    return Choices(*kernel.verify(logits, torch.cat(probs) if probs else None, requests, stats))


def choose_most_likely(logits: Tensor) -> Choices:
    """`choose` for greedy requests without drafts, one for each row of `logits`."""
    return Choices(*kernel.verify(logits, None, kernel.greedy_rows(len(logits), logits.device)))


def as_verified(rows: Sequence[VerifyRow], token_ids: list[int], num_accepted: list[int]) -> list[Verified]:
    """The host's view of `Choices`."""
    results, start = [], 0
    for row, accepted in zip(rows, num_accepted, strict=True):
        results.append(Verified(token_ids[start : start + accepted + 1], accepted))
        start += 1 + len(row.draft_ids)
    return results


def target_tokens(
    logits: Tensor,
    seed_keys: Sequence[int],
    positions: Sequence[int],
    greedy: Sequence[bool],
    overshoot: Tensor | None = None,
) -> Tensor:
    """The token at each position: argmax(logits) for greedy rows, argmax(log p + G(seed_key, position)) for the others.

    log p and logits differ by a constant of the row, which no argmax sees; they are shifted to a maximum of zero, so
    that float32 resolves the noise next to them.

    Args:
        logits: [R, V] float32, filtered; -inf is never chosen.
        seed_keys, positions, greedy: [R] on the host.
        overshoot: [R] int64 on the device: by how much the positions are too large; None: 0.

    Returns:
        [R] int64 on the device of `logits`.
    """
    rules = [Rule.GREEDY if is_greedy else Rule.INVARIANT for is_greedy in greedy]
    parts = zip(seed_keys, positions, rules, strict=True)
    rows = [VerifyRow(seed, position, (), None, rule) for seed, position, rule in parts]
    return choose(logits, rows, overshoot=overshoot).token_ids


def accept_equal(draft_ids: Sequence[int], target_ids: Sequence[int]) -> Verified:
    """The longest prefix of k drafts that equals the 1 + k target tokens, and the target's token at that position."""
    accepted = 0
    while accepted < len(draft_ids) and draft_ids[accepted] == target_ids[accepted]:
        accepted += 1
    return Verified(list(target_ids[: accepted + 1]), accepted)
