"""Synthetic acceptance: drafts are accepted at given rates, regardless of their tokens. For benchmarks; the text is
meaningless.

It shows the speed of a drafter at an acceptance that it does not have yet. The rates are COMPAT's and vLLM's:
`rates[j]` is the share of all rounds in which the draft at position j is accepted, so that

    P(draft j is accepted | those before it were) = rates[j] / rates[j - 1],  rates[-1] = 1,

and the mean number of tokens a round is 1 + sum(rates). The accepted tokens are the drafts themselves, and the token
after them is the target's, so every part of a step has its real cost. The coins are counter-based, like all noise: a
request with a seed accepts the same numbers of drafts in every run and batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.noise import Stream, row_keys, uniform
from ...kernels.verification import NO_TOKEN
from .verification import Choices, Rule, VerifyRow, choose


def accept_at_rates(row: VerifyRow, rates: Sequence[float]) -> int:
    """Number of the row's drafts that are accepted.

    Args:
        rates: [at least the row's k] in [0, 1], never rising.
    """
    k = len(row.draft_ids)
    if k == 0:
        return 0
    positions = range(row.first_position, row.first_position + k)
    coins = uniform(row_keys([row.seed_key] * k, positions, Stream.ACCEPT)).tolist()
    before = 1.0
    for place, (coin, rate) in enumerate(zip(coins, rates, strict=False)):
        # In this form a rate of 0 needs no division, and one equal to its predecessor always accepts: coins are < 1.
        if coin * before >= rate:
            return place
        before = rate
    return k


def choose_synthetic(logits: Tensor, rows: Sequence[VerifyRow], rates: Sequence[float]) -> Choices:
    """Replaces `verification.choose`, for rows of every rule; the host waits for the device.

    Args:
        logits: [sum(1 + k_i), V] float32 after every sampling parameter, the rows' in order.
        rows: the requests; k_i = len(draft_ids) may be 0 and is at most len(rates).
        rates: share of the rounds that accept the draft at each position.

    Raises:
        ValueError: a row has more drafts than there are rates, or the number of logits rows does not fit.
    """
    most = max((len(row.draft_ids) for row in rows), default=0)
    if most > len(rates):
        raise ValueError(f"{most} drafts for {len(rates)} synthetic acceptance rates")
    plain = [
        row._replace(
            first_position=row.first_position + j,
            draft_ids=(),
            rule=Rule.GREEDY if row.rule is Rule.GREEDY else Rule.INVARIANT,
        )
        for row in rows
        for j in range(1 + len(row.draft_ids))
    ]
    tokens, accepted, start = choose(logits, plain).token_ids.tolist(), [], 0
    for row in rows:
        accepted.append(accept_at_rates(row, rates))
        end = start + 1 + len(row.draft_ids)
        tokens[start : start + accepted[-1]] = row.draft_ids[: accepted[-1]]
        tokens[start + accepted[-1] + 1 : end] = [NO_TOKEN] * (len(row.draft_ids) - accepted[-1])
        start = end
    return Choices(*(torch.tensor(numbers, device=logits.device) for numbers in (tokens, accepted)))
