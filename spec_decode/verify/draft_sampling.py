"""Drawing of drafts from a neural drafter's logits, by each request's own sampling parameters and rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.device_outcome import DeviceIds, DeviceTokens, OnDevice, device_tokens
from ...kernels.noise import ROUND, Stream, device_row_keys, gumbel_argmax, row_keys
from ...kernels.sampling import filter_logits, most_likely, row_stats
from ...kernels.staging import to_device
from ...models.pass_chain import Drawn, Draws
from ...platform.core.request import NO_DRAFTS, Drafts
from ..drafters.base import DraftRow
from .verification import Rule, target_tokens

EditLogits = Callable[[Tensor, Sequence[tuple[DraftRow, tuple[Sequence[int], ...]]]], None]
"""Applies the parameters that change single logits (masks, biases, penalties) in place: to logits [B, V] float32 of the
next token after the tokens of each row's request and those given with it, in some parts."""


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
    """First position that the catch-up pass need not compute."""
    draft_ids: list[int] = field(default_factory=list)
    device_ids: list[tuple[OnDevice, int]] = field(default_factory=list)
    """Source of each draft and its index there, instead of `draft_ids` if the host does not wait for them."""
    draft_probs: list[Tensor] = field(default_factory=list)
    """[V] float32 each, when the request is verified by rejection sampling."""
    confidence: list[float] = field(default_factory=list)
    """See `Drafts`; of rows that are rated."""

    @property
    def drafts(self) -> Drafts:
        """The drafts so far."""
        if not self.num_drafts:
            return NO_DRAFTS
        ids: Sequence[int] = self.draft_ids
        if self.device_ids:
            assert len({source for source, _ in self.device_ids}) == 1, "join_drafts comes first"
            ids = DeviceIds(self.device_ids[0][0], [place for _, place in self.device_ids])
        return Drafts(ids, torch.stack(self.draft_probs) if self.draft_probs else None, self.confidence)

    @property
    def num_drafts(self) -> int:
        """Number of drafts so far."""
        return len(self.draft_ids) + len(self.device_ids)

    @property
    def new_tokens(self) -> tuple[Sequence[int], ...]:
        """Tokens after the request's own, in parts: the drafts, which the host may not know. `DraftRow.seen` has those
        that the device has sampled."""
        return self.draft_ids, *(DeviceIds(source, [place]) for source, place in self.device_ids)


class PassOutput(NamedTuple):
    """Output of a drafter's pass over B sequences."""

    hidden: Tensor
    """[B, H] of their last tokens."""
    logits: Tensor | None = None
    """[B, V] or [B, Vd] float32 of the next tokens, if the pass computed them: valid until the next pass, and a draw
    may change them."""
    best: Tensor | None = None
    """[B] int64: the most likely of these tokens, by the target's ids; valid until the next pass."""
    overshoot: Tensor | None = None
    """[B] int64 on the device: by how many positions the sequences are shorter than the host assumes; None: 0."""

    def rows(self, index: Tensor) -> PassOutput:
        """The output of some of the sequences."""
        return PassOutput(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A drafter's own vocabulary: Vd of the target's V tokens."""

    target_ids: Tensor
    """[Vd] int64, all different: the target's id of each."""
    target_size: int
    """V"""

    def widen(self, logits: Tensor) -> Tensor:
        """[B, Vd] to [B, V]; other tokens get -inf."""
        wide = logits.new_full((logits.shape[0], self.target_size), -torch.inf)
        return wide.index_copy_(1, self.target_ids, logits)


def draw(
    sequences: Sequence[Drafting],
    logits: Tensor,
    vocabulary: DraftVocabulary | None = None,
    edit: EditLogits | None = None,
    best: Tensor | None = None,
    overshoot: Tensor | None = None,
    confidence: Tensor | None = None,
) -> None:
    """Append one draft to each of B sequences.

    Greedy requests get the most likely token; requests under the drafter-invariant rule draw from q with the noise that
    the target will use, by the *target's* token ids; the others draw with noise of their own, and keep q.

    Args:
        logits: [B, V] float32, or [B, Vd] with a `vocabulary`; may be changed.
        edit: for requests with such parameters. A drafter without the request's mask would be wrong most of the time.
        best: `most_likely_ids` of the logits, if known already; may be overwritten later.
        overshoot: see `PassOutput.overshoot`.
        confidence: [B] see `Drafts`; None: the largest probability of q before filters, which is known before a draft
            is drawn from it. The host reads it for rows that are rated, unless drafts stay on the device.
    """
    if best is not None and takes_best(sequences, edit):
        _append_from(sequences, OnDevice(best.clone()))
        return
    edited = [] if edit is None else [i for i, s in enumerate(sequences) if s.row.request.sampling.edits_logits]
    if edited and edit is not None:
        logits, vocabulary = logits if vocabulary is None else vocabulary.widen(logits), None
        index = to_device(np.array(edited), logits.device)
        picked = logits[index]
        edit(picked, [(sequences[i].row, sequences[i].new_tokens) for i in edited])
        logits[index] = picked
    greedy = all(s.rule is Rule.GREEDY for s in sequences)
    if stays_on_device(logits):
        if greedy:
            source = OnDevice(most_likely_ids(logits, vocabulary))
        else:
            wide = logits if vocabulary is None else vocabulary.widen(logits)
            source = OnDevice(_sample(sequences, wide, overshoot))
        _append_from(sequences, source)
        return
    if sequences[0].row.is_rated:
        rated = (1.0 / row_stats(logits)[1] if confidence is None else confidence).tolist()
        for sequence, chance in zip(sequences, rated, strict=True):
            sequence.confidence.append(chance)
    if greedy:
        known, _ = most_likely(logits)
        tokens = known if vocabulary is None else vocabulary.target_ids[known].tolist()
    else:
        wide = logits if vocabulary is None else vocabulary.widen(logits)
        tokens = _sample(sequences, wide, overshoot).tolist()
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.draft_ids.append(token)


def most_likely_ids(logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
    """[..., V] or [..., Vd] to the target's id [...] of the largest; the host does not wait."""
    best = logits.argmax(dim=-1)
    return best if vocabulary is None else vocabulary.target_ids[best]


def takes_best(sequences: Sequence[Drafting], edit: EditLogits | None) -> bool:
    """True when the next draft of each sequence is the most likely token of its logits as they are."""
    return all(s.rule is Rule.GREEDY and (edit is None or not s.row.request.sampling.edits_logits) for s in sequences)


def append_best(sequences: Sequence[Drafting], best: Tensor) -> None:
    """Append to each of B sequences its number of drafts, all of which are known.

    Args:
        best: [k or more, B] int64 on the device: the most likely tokens, by the target's ids; may be overwritten later.
    """
    source = OnDevice(best.flatten().clone())
    for place, sequence in enumerate(sequences):
        sequence.device_ids += [(source, draft * best.shape[1] + place) for draft in range(sequence.num_wanted)]


def chain_draws(sequences: Sequence[Drafting], edit: EditLogits | None) -> Draws | None:
    """Parameters by which a loop draws all drafts of B sequences; a sequence that lags gets none (its `start` is before
    its `end`). None when no sequence gets drafts, or edits that depend on the drafts before need the host."""
    wanted = [s.num_wanted if s.start >= s.end else 0 for s in sequences]
    requests = [s.row.request for s in sequences]
    if not any(wanted) or (edit is not None and any(request.sampling.edits_logits for request in requests)):
        return None
    rules = [s.rule for s in sequences]
    if all(rule is Rule.GREEDY for rule in rules):
        return Draws(wanted)
    streams = {Rule.GREEDY: None, Rule.INVARIANT: Stream.TARGET, Rule.REJECTION: Stream.DRAFT}
    params = [request.params for request in requests]
    return Draws(
        wanted,
        [request.seed_key for request in requests],
        [streams[rule] for rule in rules],
        heat=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        keeps_probs=Rule.REJECTION in rules,
    )


def append_drawn(sequences: Sequence[Drafting], draws: Draws, drawn: Drawn) -> None:
    """Append the drafts of a loop to its B sequences."""
    source = OnDevice(drawn.tokens.flatten().clone())
    for place, (sequence, count) in enumerate(zip(sequences, draws.num_wanted, strict=True)):
        sequence.device_ids += [(source, draft * drawn.tokens.shape[1] + place) for draft in range(count)]
        if drawn.probs is not None and sequence.rule is Rule.REJECTION and count:
            sequence.draft_probs = [*drawn.probs[:count, place].clone()]


def _append_from(sequences: Sequence[Drafting], source: OnDevice) -> None:
    for place, sequence in enumerate(sequences):
        sequence.device_ids.append((source, place))


def stays_on_device(logits: Tensor) -> bool:
    """True when the host does not wait for drafts: the next pass and verification read them on the device."""
    return logits.is_cuda


def last_drafts(sequences: Sequence[Drafting]) -> tuple[list[list[int]], list[DeviceTokens]]:
    """The last draft of each of B sequences, which were drawn together, as one pass's tokens: [B] lists of one, with
    their sources if the host does not know them."""
    if not sequences[0].device_ids:
        return [s.draft_ids[-1:] for s in sequences], []
    ids = [DeviceIds(source, [place]) for source, place in (s.device_ids[-1] for s in sequences)]
    return [[0] for _ in sequences], device_tokens(enumerate(ids))


def join_drafts(sequences: Sequence[Drafting]) -> None:
    """Let all drafts that are on the device have one source."""
    sources = list(dict.fromkeys(source for s in sequences for source, _ in s.device_ids))
    if len(sources) < 2:
        return
    starts = np.cumsum([0, *(len(source.tensor) for source in sources)]).tolist()
    first = dict(zip(sources, starts, strict=False))
    joined = OnDevice(torch.cat([source.tensor for source in sources]))
    for sequence in sequences:
        sequence.device_ids = [(joined, first[source] + place) for source, place in sequence.device_ids]


def _sample(sequences: Sequence[Drafting], logits: Tensor, overshoot: Tensor | None) -> Tensor:
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
    positions = [len(s.row.tokens) + s.num_drafts for s in sequences]
    independent = [i for i, s in enumerate(sequences) if s.rule is Rule.REJECTION]
    greedy = [s.rule is not Rule.INVARIANT for s in sequences]  # independent ones are overwritten below
    tokens = target_tokens(logits, seeds, positions, greedy, overshoot)
    if independent:
        index = to_device(np.array(independent), logits.device)
        q = logits[index].softmax(dim=-1)
        picked = [seeds[i] for i in independent], [_draft_position(sequences[i]) for i in independent]
        if overshoot is None:
            keys = to_device(row_keys(*picked, Stream.DRAFT).numpy(), q.device)
        else:
            places = to_device(np.array(picked[1]), q.device) - overshoot[index] * ROUND
            keys = device_row_keys(picked[0], places, Stream.DRAFT)
        tokens[index] = gumbel_argmax(q.log(), keys)
        for i, probs in zip(independent, q, strict=True):
            sequences[i].draft_probs.append(probs)
    return tokens


def _draft_position(sequence: Drafting) -> int:
    """Position in the stream of drafts of a sequence's next draft."""
    return len(sequence.row.tokens) * ROUND + sequence.num_drafts
