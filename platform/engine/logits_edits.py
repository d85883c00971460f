"""Sampling parameters that change single logits: masks, biases and penalties.

Each edit is a function of the request's parameters and its tokens, drafts before the row included, so that neither
preemption nor rejected drafts can make it stale: `Request.counts` only remembers how far the accepted tokens, which
are never taken back, have been counted. All are vectorised over the rows that want them, whatever the batch. Penalties
are a kernel, for which the device need not tell the host which tokens it has drafted or sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...kernels.penalties import Penalised, penalise
from ...kernels.staging import to_device
from ...spec_decode.proposer import DraftRow
from ..core.request import Request
from ..core.sampling_params import SamplingParams

NEGATIVE_INFINITY = float("-inf")


class Seen(NamedTuple):
    """A sequence's tokens, read when a step is launched: they may grow while it runs."""

    entries: np.ndarray
    """[E], see `Penalised.entries`."""
    late: tuple[Sequence[int], ...] = ()
    """More, which only the device knows; -1: none."""

    def after(self, tokens: Sequence[int]) -> Seen:
        """With more of these."""
        return self._replace(late=(*self.late, tokens))


class LogitsRow(NamedTuple):
    """What one row of the logits is about: the request's next token after its tokens and `drafts`."""

    place: int
    """Row of the logits."""
    request: Request
    drafts: tuple[Sequence[int], ...]
    """The drafts before this row, in some parts, which may be late; they count like generated tokens."""
    num_tokens: int | None = None
    """Of the sequence, where the last one is still being sampled; None: those that it has."""
    seen: Seen | None = None
    """Its tokens, for penalties; None: those that it has."""

    @property
    def num_drafts(self) -> int:
        """How many drafts are before this row."""
        return sum(map(len, self.drafts))

    @property
    def num_outputs(self) -> int:
        """How many generated tokens this row continues."""
        num_tokens = len(self.request.tokens) if self.num_tokens is None else self.num_tokens
        return num_tokens - self.request.num_prompt_tokens + self.num_drafts

    @property
    def outputs(self) -> list[int]:
        """Generated tokens that this row continues."""
        return [*self.request.tokens[self.request.num_prompt_tokens :], *chain.from_iterable(self.drafts)]


@dataclass(frozen=True, slots=True)
class Edit:
    """One kind of edit: whether a request wants it, and its effect on the rows that do (in place)."""

    wanted: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, Sequence[LogitsRow]], None]


def apply_edits(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Edit `logits` [R, V] (float32) in place, in vLLM's order: allowed tokens, bad words, minimum length, bias,
    penalties."""
    for edit in EDITS:
        chosen = [row for row in rows if edit.wanted(row.request.params)]
        if chosen:
            edit.apply(logits, chosen)


def edit_draft_logits(logits: Tensor, rows: Sequence[tuple[DraftRow, tuple[Sequence[int], ...]]]) -> None:
    """`apply_edits` for drafters: logits [B, V] after each row's request's tokens and those given with it."""
    apply_edits(logits, [LogitsRow(i, row.request, drafts, None, row.seen) for i, (row, drafts) in enumerate(rows)])


def _flat(logits: Tensor, pairs: Sequence[tuple[LogitsRow, Sequence[int] | np.ndarray]]) -> Tensor:
    """Indices into `logits.view(-1)` of these tokens of these rows. Tokens are below V: admission checks it."""
    width = logits.shape[1]
    parts = [np.asarray(tokens, dtype=np.int64) + row.place * width for row, tokens in pairs]
    return to_device(np.concatenate(parts), logits.device)


def _ban(logits: Tensor, pairs: Sequence[tuple[LogitsRow, Sequence[int]]]) -> None:
    if any(len(tokens) for _, tokens in pairs):
        logits.view(-1)[_flat(logits, pairs)] = NEGATIVE_INFINITY


def _allow_only(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    where = _flat(logits, [(row, row.request.params.allowed_token_ids or ()) for row in rows])
    kept = logits.view(-1)[where]
    logits[to_device(np.array([row.place for row in rows]), logits.device)] = NEGATIVE_INFINITY
    logits.view(-1)[where] = kept


def _banned_by_words(row: LogitsRow) -> list[int]:
    """Tokens that would complete a bad word."""
    words = row.request.params.bad_words_token_ids
    # Drafts may still be on the device: only words of several tokens make the host wait for them.
    outputs = row.outputs if any(len(word) > 1 for word in words) else []
    last = outputs[-1] if outputs else None
    return [
        word[-1]
        for word in words
        # Most words fail on the cheap comparison.
        if len(word) == 1 or (word[-2] == last and outputs[1 - len(word) :] == word[:-1])
    ]


def _bad_words(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    _ban(logits, [(row, _banned_by_words(row)) for row in rows])


def _min_tokens(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """No end-of-sequence and no stop token before `min_tokens` tokens."""
    short = [row for row in rows if row.num_outputs < row.request.params.min_tokens]
    _ban(logits, [(row, [*row.request.eos_token_ids, *row.request.stop_ids]) for row in short])


def _logit_bias(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    pairs = [(row, list(row.request.params.logit_bias or ())) for row in rows]
    amounts = [bias for row in rows for bias in (row.request.params.logit_bias or {}).values()]
    logits.view(-1)[_flat(logits, pairs)] += to_device(np.array(amounts, np.float32), logits.device)


def token_entries(request: Request) -> np.ndarray:
    """[E] int64, a copy: the counts of all tokens that the host knows, see `TokenCounts.entries`."""
    request.counts.count(request.tokens, request.num_prompt_tokens)
    return np.frombuffer(request.counts.entries, dtype=np.int64).copy()


def _penalties(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    of_requests: dict[int, list[LogitsRow]] = {}
    for row in rows:
        of_requests.setdefault(id(row.request), []).append(row)
    sequences = []
    for own in of_requests.values():
        last = max(own, key=lambda row: row.num_drafts)
        params = last.request.params
        seen = Seen(token_entries(last.request)) if last.seen is None else last.seen
        sequences.append(
            Penalised(
                places=[row.place for row in own],
                num_after=[sum(map(len, seen.late)) + row.num_drafts for row in own],
                entries=seen.entries,
                after=(*seen.late, *last.drafts),
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )
        )
    penalise(logits, sequences)


EDITS: tuple[Edit, ...] = (
    Edit(lambda p: p.allowed_token_ids is not None, _allow_only),
    Edit(lambda p: bool(p.bad_words_token_ids), _bad_words),
    Edit(lambda p: p.min_tokens > 0, _min_tokens),
    Edit(lambda p: bool(p.logit_bias), _logit_bias),
    Edit(lambda p: p.penalises, _penalties),
)
