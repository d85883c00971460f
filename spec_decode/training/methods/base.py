"""Contract between the training loop and the drafters that it trains, and the losses that they share.

Drafters guess at *labels* (`target.Labels`). A guess for the token after position p, as j-th further draft of a round,
is made at the round's root p - 1 - j: the target has read the tokens up to the root and has sampled the next one.

    tokens      ... x[t]   x[t+1]        x[t+2]   x[t+3]
    target      ... h[t]   sampled
    drafter         root   draft j=0 ->  guess    j=1 -> guess
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..target import Features, Labels

_CHUNK_ELEMENTS = 1 << 22  # logits held at a time: a few are read again and again, and should stay in the cache

STEP_DECAY = 0.8
"""Weight in the loss of each step of an unroll, or Medusa head, over that of the one before."""


class TrainedDrafter(nn.Module, ABC):
    """A network that is trained to guess tokens."""

    whole = True
    """False in training steps that leave out all but the first step of an unroll (`--unroll-every`)."""

    @abstractmethod
    def loss(self, features: Features) -> Tensor:
        """The mean loss of a batch, a scalar."""

    @abstractmethod
    def guesses(self, features: Features, k: int) -> Tensor:
        """[N, k]: the greedy guess at each label as j-th draft of a round; -1 if there is no root for it."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the public format into a folder that exists."""

    @property
    def vocabulary(self) -> Tensor | None:
        """The target's ids of the draft vocabulary [V], ascending; None when it is the target's."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Trained tensors, by name."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the tensors of a `state`."""
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


class Step(NamedTuple):
    """A drafter's states at one step of its unroll."""

    hidden: Tensor
    """[M, H], as its lm_head reads them."""
    labels: Tensor
    """[M] labels that they guess at, ascending."""


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum over steps and states of share * sum_v p(v) log softmax(hidden @ weight.T)(v), p the target's distribution.

    Gradients are computed with the loss, a chunk of labels at a time: softmax - p is at hand then, and neither logits
    nor p of a whole batch are ever held. All steps of a chunk share its p.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, wanted: Wanted, shares: list[float], steps: list[Step], *_: Tensor) -> Tensor:
        """shares: of each step's states, what one counts. The states come once more as `_`, for autograd."""
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        matrix, training = weight.to(dtype), any(ctx.needs_input_grad)
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        by_hidden = [torch.zeros_like(step.hidden, dtype=torch.float32) for step in steps] if training else []
        total = torch.zeros((), device=weight.device)
        size = max(1, _CHUNK_ELEMENTS // len(weight))
        edges = [*range(0, wanted.number, size), wanted.number]
        ends = [torch.searchsorted(step.labels, torch.tensor(edges, device=weight.device)).tolist() for step in steps]
        for chunk, (first, last) in enumerate(pairwise(edges)):
            p = wanted.distribution(first, last)
            for number, (hidden, index) in enumerate(steps):
                rows = slice(ends[number][chunk], ends[number][chunk + 1])
                if rows.start == rows.stop:
                    continue
                some = p if rows.stop - rows.start == len(p) else p[index[rows] - first]
                states, share = hidden[rows].to(dtype), shares[number]
                with torch.autocast(kind, enabled=False):  # it would round p and the logarithms
                    logs = (states @ matrix.T).float().log_softmax(-1)
                    total -= torch.linalg.vecdot(some, logs).sum() * share
                    if training:
                        slope = logs.exp_().sub_(some).to(dtype)
                        by_hidden[number][rows] = (slope @ matrix).float() * share
                    if by_weight is not None:
                        by_weight += (slope.T @ states).float() * share
        ctx.gradients = by_weight, [g.to(s.hidden.dtype) for g, s in zip(by_hidden, steps, strict=False)]
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Gradients of `forward`'s arguments."""
        by_weight, by_hidden = ctx.gradients
        return None if by_weight is None else by_weight * outer[0], None, None, None, *(g * outer[0] for g in by_hidden)


class Wanted(NamedTuple):
    """The target's distributions at `number` labels."""

    number: int
    distribution: Callable[[int, int], Tensor]
    """[last - first, V] float32, of the labels from `first` to `last`."""


def build_wanted(features: Features, labels: Tensor | None = None, tokens: Tensor | None = None) -> Wanted:
    """The target's distributions at a batch's labels, or at those of indices `labels`.

    Args:
        tokens: the draft vocabulary [V], over which the softmax is taken; None for the target's.
    """
    states = features.labels.states if labels is None else features.labels.states[labels]
    return Wanted(len(states), lambda first, last: features.head.logits(states[first:last], tokens).softmax(-1))


def soft_cross_entropy(steps: Sequence[Step], weight: Tensor, wanted: Wanted) -> Tensor:
    """Mean over the steps, weighted by powers of `STEP_DECAY`, of their cross entropies with the target.

    Args:
        steps: a step's is the mean over its states; 0 for one without states.
        weight: the lm_head [V, H].
    """
    factors = [STEP_DECAY**number for number in range(len(steps))]
    shares = [factor / (sum(factors) * max(1, len(step.labels))) for factor, step in zip(factors, steps, strict=True)]
    hidden = [step.hidden for step in steps]
    loss: Tensor = _SoftCrossEntropy.apply(weight, wanted, shares, [Step(h.detach(), i) for h, i in steps], *hidden)
    return loss


def greedy_tokens(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, vocab_size: int) -> Tensor:
    """Most likely tokens [M] of `logits_of(hidden [M, H])`, computed in chunks."""
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return torch.cat([logits_of(rows).argmax(-1) for rows in hidden.split(size)])
