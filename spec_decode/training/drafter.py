"""What the training loop asks of a drafter, and the losses that drafters share.

Drafters guess at *labels* (`target.Labels`). A guess for the token after position p, as j-th further draft of a round,
is made at the round's root p - 1 - j: the target has read the tokens up to the root and has sampled the next one.

    tokens      ... x[t]   x[t+1]        x[t+2]   x[t+3]
    target      ... h[t]   sampled
    drafter         root   draft j=0 ->  guess    j=1 -> guess
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .target import Features, Labels

_CHUNK_ELEMENTS = 1 << 26  # logits held at a time


class Drafter(nn.Module, ABC):
    """Something trainable that guesses tokens."""

    @abstractmethod
    def loss(self, features: Features) -> Tensor:
        """The mean loss of a batch, a scalar."""

    @abstractmethod
    def guesses(self, features: Features, k: int) -> Tensor:
        """[N, k]: the greedy guess at each label as j-th draft of a round; -1 where there is no root for it."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the public format into a folder that exists."""

    def state(self) -> dict[str, Tensor]:
        """What is trained, by name."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        own = self.state()
        if own.keys() != state.keys():
            raise ValueError(f"the state has {sorted(state)}, the drafter {sorted(own)}")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def matrices(self) -> list[nn.Parameter]:
        """Trained matrices of hidden layers, which Muon may train."""
        return [
            p
            for name, p in self.named_parameters()
            if p.requires_grad and p.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "lora_"))
        ]


def at_roots(hidden: Tensor, labels: Labels, step: int) -> tuple[Tensor, Tensor]:
    """The states [M, H] at the roots of draft number `step`, and which labels [M] they guess."""
    roots = labels.positions - 1 - step
    index = (roots >= 0).nonzero(as_tuple=True)[0]
    return hidden[labels.rows[index], roots[index]], index


def soft_cross_entropy(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, target: Tensor, weights: Tensor
) -> Tensor:
    """Mean, by weights [M], cross entropy of `logits_of(hidden [M, H])` against the softmax of logits [M, V].

    Chunks of rows are computed again in the backward pass, so that a large vocabulary fits.
    """
    if not len(hidden):
        return hidden.sum() * 0.0

    def one(rows: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
        return -((wanted.softmax(-1) * logits_of(rows).float().log_softmax(-1)).sum(-1) * counts).sum()

    size = max(1, _CHUNK_ELEMENTS // target.shape[-1])
    if len(hidden) <= size:
        return one(hidden, target, weights) / weights.sum()
    parts = [
        checkpoint(one, rows, wanted, counts, use_reentrant=False)
        for rows, wanted, counts in zip(hidden.split(size), target.split(size), weights.split(size), strict=True)
    ]
    return torch.stack(parts).sum() / weights.sum()


def greedy_tokens(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, vocab_size: int) -> Tensor:
    """argmax of `logits_of(hidden [M, H])`, [M], in chunks."""
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return torch.cat([logits_of(rows).argmax(-1) for rows in hidden.split(size)])


def weighted_mean(losses: Iterator[Tensor], decay: float) -> Tensor:
    """Sum of losses weighted 1, decay, decay^2, ..., over the sum of the weights."""
    total, weight, weights = torch.zeros(()), 1.0, 0.0
    for loss in losses:
        total, weights, weight = total.to(loss.device) + weight * loss, weights + weight, weight * decay
    return total / weights
