"""What a run may be expected to reach, said before it starts; it warns where data or steps are too few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .data import Sample, learned_tokens
from .drafter import Drafter

_FEW_TOKENS = 100_000
"""Learned tokens below which a head mostly remembers its samples."""
_FEW_TRAINED = 1_000_000
"""Learned tokens, counted in every epoch, below which little is accepted."""
_FEW_STEPS = 200
_COVERED = 0.97
"""Share of the held-out tokens in the draft vocabulary below which the rest is felt: a draft outside is impossible."""


def outlook(
    drafter: Drafter, samples: Sequence[Sample], held_out: Sequence[Sample], steps: int, steps_per_epoch: int
) -> Iterator[str]:
    """Lines about the size of a run, and warnings."""
    learned = learned_tokens(samples).total()
    trained = learned * steps / steps_per_epoch
    weights = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    yield (
        f"{weights / 1e6:.1f} M weights to train in {steps:,} steps, {steps / steps_per_epoch:.1f} times over "
        f"{learned:,} tokens of {len(samples):,} samples"
    )
    tokens = drafter.vocabulary
    if tokens is not None:
        seen, known = learned_tokens(held_out), set(tokens.tolist())
        share = sum(count for token, count in seen.items() if token in known) / max(1, seen.total())
        yield f"draft vocabulary of {len(tokens):,} tokens, with {share:.1%} of the held-out ones"
        if share < _COVERED:
            yield f"warning: of the others none can be drafted; a larger --draft-vocab-size than {len(tokens)} may help"
    if learned < _FEW_TOKENS:
        yield (
            f"warning: {learned:,} tokens to learn from are few, below {_FEW_TOKENS:,} little carries over to other "
            "texts: give more prompts, or more --max-tokens"
        )
    if trained < _FEW_TRAINED or steps < _FEW_STEPS:
        yield (
            f"warning: {steps:,} steps over {trained:,.0f} tokens in all are few, heads need {_FEW_STEPS} steps and "
            f"{_FEW_TRAINED:,} tokens to be of use: give more --epochs or --steps"
        )
