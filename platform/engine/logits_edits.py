"""Sampling parameters that change single logits: masks, biases and penalties.

Each edit is a function of the request's parameters and its tokens, drafts before the row included, so that neither
preemption nor rejected drafts can make it stale: `Request.counts` only remembers how far the accepted tokens, which
are never taken back, have been counted. All are vectorised over the rows that want them: one gather and one
scatter on the flat logits, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.staging import to_device
from ..core.request import Request, TokenCounts
from ..core.sampling_params import SamplingParams

NEGATIVE_INFINITY = float("-inf")


class LogitsRow(NamedTuple):
    """What one row of the logits is about: the request's next token after its tokens and `drafts`."""

    place: int
    """Row of the logits."""
    request: Request
    drafts: Sequence[int]
    """The drafts before this row; they count like generated tokens."""
    num_tokens: int | None = None
    """Of the sequence, where the last one is still being sampled; None: those that it has."""

    @property
    def num_outputs(self) -> int:
        """How many generated tokens this row continues."""
        num_tokens = len(self.request.tokens) if self.num_tokens is None else self.num_tokens
        return num_tokens - self.request.num_prompt_tokens + len(self.drafts)

    @property
    def outputs(self) -> list[int]:
        """Generated tokens that this row continues."""
        return self.request.tokens[self.request.num_prompt_tokens :] + list(self.drafts)


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


def edit_draft_logits(logits: Tensor, rows: Sequence[tuple[Request, Sequence[int]]]) -> None:
    """`apply_edits` for drafters: logits [B, V] after each request's tokens and those given with it."""
    apply_edits(logits, [LogitsRow(place, request, drafts) for place, (request, drafts) in enumerate(rows)])


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


def _counts(request: Request) -> TokenCounts:
    """The counts of all accepted tokens, brought up to date: a step costs its new tokens, not the whole sequence."""
    counts = request.counts
    if counts.num_counted < len(request.tokens):
        for position in range(counts.num_counted, len(request.tokens)):
            token = request.tokens[position]
            counts.generated.setdefault(token, 0)
            counts.generated[token] += position >= request.num_prompt_tokens
        counts.num_counted = len(request.tokens)
    return counts


def _repetition(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Logits of tokens seen in the prompt or the output are divided by the penalty, or multiplied where negative
    (Keskar et al. 2019, CTRL, section 4.1)."""
    pairs = []
    for row in rows:
        seen = _counts(row.request).generated
        pairs.append((row, [*seen, *(token for token in set(row.drafts) if token not in seen)]))
    factors = np.concatenate(
        [np.full(len(tokens), row.request.params.repetition_penalty, np.float32) for row, tokens in pairs]
    )
    where = _flat(logits, pairs)
    factor, values = to_device(factors, logits.device), logits.view(-1)[where]
    logits.view(-1)[where] = torch.where(values > 0, values / factor, values * factor)


def _presence_and_frequency(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Logits of generated tokens lose `presence_penalty`, and `frequency_penalty` for each time (OpenAI)."""
    pairs, amounts = [], []
    for row in rows:
        times = {token: count for token, count in _counts(row.request).generated.items() if count}
        for token in row.drafts:
            times[token] = times.get(token, 0) + 1
        params = row.request.params
        pairs.append((row, list(times)))
        counts = np.fromiter(times.values(), np.float32, len(times))
        amounts.append(np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts)
    logits.view(-1)[_flat(logits, pairs)] -= to_device(np.concatenate(amounts), logits.device)


EDITS: tuple[Edit, ...] = (
    Edit(lambda p: p.allowed_token_ids is not None, _allow_only),
    Edit(lambda p: bool(p.bad_words_token_ids), _bad_words),
    Edit(lambda p: p.min_tokens > 0, _min_tokens),
    Edit(lambda p: bool(p.logit_bias), _logit_bias),
    Edit(lambda p: p.repetition_penalty != 1.0, _repetition),
    Edit(lambda p: p.presence_penalty != 0.0 or p.frequency_penalty != 0.0, _presence_and_frequency),
)
