"""How neural drafters choose their drafts: from logits, by each request's own sampling parameters and rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.noise import Stream, gumbel_argmax, row_keys
from ..kernels.sampling import filter_logits, most_likely
from ..platform.core.request import NO_DRAFTS, Drafts, Request
from .proposer import DraftRow
from .verification import Rule, target_tokens

EditLogits = Callable[[Tensor, Sequence[tuple[Request, list[int]]]], None]
"""Applies the parameters that change single logits (masks, biases, penalties) in place: to logits [B, V] float32 of the
next token after each request's tokens and those given with it."""


@dataclass(slots=True)
class Drafting:
    """One row while it is drafted for; lives for one `propose`."""

    row: DraftRow
    rule: Rule
    num_wanted: int = 0
    """Drafts to make."""
    start: int = 0
    """Leading positions whose KV in the drafter's layers is valid; of drafters that have any."""
    end: int = 0
    """How far the catch-up pass would have to get."""
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)
    """[V] float32 each, when the request is verified by rejection sampling."""

    @property
    def drafts(self) -> Drafts:
        """What was drafted."""
        if not self.draft_ids:
            return NO_DRAFTS
        return Drafts(self.draft_ids, torch.stack(self.draft_probs) if self.draft_probs else None)

    @property
    def new_tokens(self) -> list[int]:
        """What follows the request's tokens: those of this step, which are not in it yet, and the drafts."""
        return self.row.tokens[len(self.row.request.tokens) :] + self.draft_ids


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A drafter's own vocabulary: Vd of the target's V tokens."""

    target_ids: Tensor
    """[Vd] int64, all different: the target's id of each."""
    target_size: int
    """V"""

    def widen(self, logits: Tensor) -> Tensor:
        """[B, Vd] to [B, V]; what the drafter does not know gets -inf."""
        wide = logits.new_full((logits.shape[0], self.target_size), -torch.inf)
        return wide.index_copy_(1, self.target_ids, logits)


def draw(
    sequences: Sequence[Drafting],
    logits: Tensor,
    vocabulary: DraftVocabulary | None = None,
    edit: EditLogits | None = None,
) -> None:
    """Append one draft to each of B sequences.

    Greedy requests get the most likely token; requests under the drafter-invariant rule draw from q with the noise that
    the target will use, by the *target's* token ids; the others draw with noise of their own, and q goes along.

    Args:
        logits: [B, V] float32, or [B, Vd] with a `vocabulary`; may be changed.
        edit: for requests with such parameters. A drafter that did not know of a mask would be wrong most of the time.
    """
    edited = [] if edit is None else [i for i, s in enumerate(sequences) if s.row.request.edits_logits]
    if edited and edit is not None:
        logits, vocabulary = logits if vocabulary is None else vocabulary.widen(logits), None
        index = torch.tensor(edited, device=logits.device)
        picked = logits[index]
        edit(picked, [(sequences[i].row.request, sequences[i].new_tokens) for i in edited])
        logits[index] = picked
    if all(s.rule is Rule.GREEDY for s in sequences):
        best, _ = most_likely(logits)
        tokens = best if vocabulary is None else vocabulary.target_ids[best].tolist()
    else:
        tokens = _sample(sequences, logits if vocabulary is None else vocabulary.widen(logits)).tolist()
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.draft_ids.append(token)


def _sample(sequences: Sequence[Drafting], logits: Tensor) -> Tensor:
    """Tokens [B] from logits [B, V]; the distributions of rejection-sampled rows are kept with their sequences."""
    params = [s.row.request.params for s in sequences]
    logits = filter_logits(
        logits,
        temperature=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
    )
    seeds = [s.row.request.seed_key for s in sequences]
    positions = [len(s.row.tokens) + len(s.draft_ids) for s in sequences]
    independent = [i for i, s in enumerate(sequences) if s.rule is Rule.REJECTION]
    greedy = [s.rule is not Rule.INVARIANT for s in sequences]  # independent ones are overwritten below
    tokens = target_tokens(logits, seeds, positions, greedy)
    if independent:
        index = torch.tensor(independent, device=logits.device)
        q = logits[index].softmax(dim=-1)
        keys = row_keys([seeds[i] for i in independent], [positions[i] for i in independent], Stream.DRAFT)
        tokens[index] = gumbel_argmax(q.log(), keys.to(q.device))
        for i, probs in zip(independent, q, strict=True):
            sequences[i].draft_probs.append(probs)
    return tokens
