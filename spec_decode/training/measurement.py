"""Acceptance on held-out texts: a greedy target's verification, replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .methods.base import TrainedDrafter
from .target import Features


class Measured(NamedTuple):
    """A drafter on held-out samples."""

    loss: float
    acceptance_length: float
    """Mean tokens of a round: the accepted drafts and the target's own token."""
    per_position: list[float]
    """Share of the rounds that accept the draft at this position, and so all before it."""


def count_rounds(hits: Sequence[Sequence[bool]], k: int) -> list[int]:
    """Accepted drafts of each round over one completion.

    Args:
        hits: for each learned token in order, whether the guess at it as j-th draft of a round is right.

    A round accepts drafts up to the first wrong one, and the target adds one token. The first token is the target's,
    sampled when it has read the prompt. Accepted drafts are the text itself, so guesses made along the text suffice.
    """
    rounds = []
    start = 1
    while start < len(hits):
        window = [hits[start + j][j] for j in range(min(k, len(hits) - start))]
        accepted = window.index(False) if False in window else len(window)
        rounds.append(accepted)
        start += accepted + 1
    return rounds


def batch_rounds(features: Features, guesses: torch.Tensor) -> list[int]:
    """`count_rounds` over every row of a batch; a guess [N, k] is right when it is the target's most likely token."""
    right = (guesses == features.head.greedy(features.labels.states)[:, None]).tolist()
    by_row: dict[int, list[list[bool]]] = {}
    for row, hits in zip(features.labels.rows.tolist(), right, strict=True):
        by_row.setdefault(row, []).append(hits)
    return [accepted for hits in by_row.values() for accepted in count_rounds(hits, guesses.shape[1])]


def summarize(loss: float, rounds: Sequence[int], k: int) -> Measured:
    """Figures over all rounds of `k` drafts."""
    count = max(1, len(rounds))
    per_position = [sum(accepted > place for accepted in rounds) / count for place in range(k)]
    return Measured(loss, 1 + sum(rounds) / count, per_position)


@torch.no_grad()
def measure(drafter: TrainedDrafter, batches: Iterable[Features], k: int) -> Measured:
    """Measure a drafter; its training mode is restored."""
    training = drafter.training
    drafter.eval()
    losses: list[float] = []
    rounds: list[int] = []
    for features in batches:
        losses.append(float(drafter.loss(features)))
        rounds += batch_rounds(features, drafter.guesses(features, k))
    drafter.train(training)
    return summarize(sum(losses) / max(1, len(losses)), rounds, k)
