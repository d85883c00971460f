"""Expected results of a run, logged before it starts; warnings if data or steps are too few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .data import Sample, learned_tokens
from .methods.base import TrainedDrafter
from .options import TrainOptions

_MEASURED = ((10_000, 1.14), (37_000, 1.20), (75_000, 1.25), (975_000, 1.46), (1_593_000, 1.80))
"""Trained tokens, and the acceptance length with 4 drafts on prompts of other topics that an EAGLE-3 head of
SmolLM2-135M had reached with them: the last one from prompts that the model itself had written, the others from
templates."""
_FEW_TOKENS = 100_000
"""Learned tokens below which a draft vocabulary and a head have too few words: 85,000 of SmolLM2's answers had only 90%
of the words of answers to other prompts."""
_FEW_TRAINED = 500_000
"""Trained tokens, counted in every epoch, that a run should have: at a seventh of them the loss of SmolLM2's head still
fell fast. Public heads see a hundred times as many."""
_FEW_STEPS = 200
"""Steps below which warm-up and decay of the learning rate take most of the run."""
_COVERED = 0.97
"""Share of the held-out tokens in the draft vocabulary below which a warning is logged: others cannot be drafted."""


def outlook(
    options: TrainOptions,
    drafter: TrainedDrafter,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    steps: int,
    steps_per_epoch: int,
) -> Iterator[str]:
    """Lines about the size of a run, and warnings."""
    learned = learned_tokens(samples).total()
    trained = learned * steps / steps_per_epoch
    weights = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    yield (
        f"{weights:,} weights to train in {steps:,} steps, {steps / steps_per_epoch:.1f} times over "
        f"{learned:,} tokens of {len(samples):,} samples"
    )
    if options.method == "draft-lora":  # of a narrow task: 63,000 tokens in 110 steps are enough
        return
    if options.method == "eagle3":
        compared = [pair for pair in _MEASURED if pair[0] <= trained] or _MEASURED[:1]
        yield (
            f"to compare: with {compared[-1][0]:,} tokens an EAGLE-3 head of a 135M model reached an acceptance length "
            f"of {compared[-1][1]:.2f}; this run trains {trained:,.0f}"
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
            f"warning: {learned:,} tokens to learn from are few; below {_FEW_TOKENS:,} many words of other texts are "
            "missing: give more prompts, or more --max-tokens"
        )
    if trained < _FEW_TRAINED or steps < _FEW_STEPS:
        yield (
            f"warning: {steps:,} steps over {trained:,.0f} tokens are few; a head needs {_FEW_STEPS} steps and "
            f"{_FEW_TRAINED:,} tokens: give more --epochs or --steps"
        )
