"""From logits to tokens: edits, filters, and the verification of drafts, for all rows of a step at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ....kernels.device_outcome import DeviceOutcome
from ....kernels.dispatch import use_triton
from ....kernels.sampling import filter_logits, logprobs_at, most_likely, row_stats, top_logprobs
from ....kernels.staging import Download, upload
from ....spec_decode.verify.synthetic import choose_synthetic
from ....spec_decode.verify.verification import (
    Choices,
    Rule,
    Verified,
    VerifyRow,
    accept_equal,
    as_verified,
    choose,
    choose_most_likely,
    choose_rule,
)
from ...core.batch import RowResult
from ...core.errors import AdapterError, InvalidRequestError, OutriderError
from ...core.request import Drafts, Request
from .logits_edits import LogitsRow, Seen, apply_edits
from .reported_logprobs import as_logprobs, given_ids, with_given

logger = logging.getLogger(__name__)


class SampleRow(NamedTuple):
    """One sequence's 1 + k rows of the logits: after its tokens, and after each of the k drafts."""

    request: Request
    drafts: Drafts
    num_tokens: int | None = None
    """Sequence length including the token in flight; None: len(request.tokens)."""
    seen: Seen | None = None
    """See `LogitsRow`."""

    def settled(self, overshoot: int) -> SampleRow:
        """Row with the true number of tokens, if `num_tokens` was too large."""
        return self if self.num_tokens is None else self._replace(num_tokens=self.num_tokens - overshoot)


def no_choice(request: Request) -> InvalidRequestError:
    """The parameters have masked all tokens of a row; the error names one of them."""
    params = request.params
    if request.grammar is not None and request.grammar.problem:
        assert params.structured_outputs is not None
        source = params.structured_outputs.source
        return InvalidRequestError(f"{source}: {request.grammar.problem}", param=source)
    wanted = {
        "structured_outputs": params.structured_outputs,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
        "min_tokens": params.min_tokens,
        "logit_bias": params.logit_bias,
    }
    names = [name for name, value in wanted.items() if value]
    if params.structured_outputs is not None:
        names[0] = params.structured_outputs.source
    together = f" ({', '.join(names)})" if names else ""
    return InvalidRequestError(
        f"the sampling parameters{together} leave no token to choose", param=names[0] if names else None
    )


def not_finite(request: Request) -> OutriderError:
    """The logits of this request are not finite: the model or its adapter has overflowed. A user's adapter may have
    finite weights that are too large."""
    message = "the model's logits are not finite"
    if request.lora is None:
        return OutriderError(message)
    return AdapterError(f"{message} with the adapter {request.lora.name!r}: its weights are too large", param="model")


class Sampler:
    """Chooses tokens. Holds no state of requests: noise comes from counters, edits from the tokens themselves."""

    def __init__(self, *, always_invariant: bool = False, synthetic_rates: Sequence[float] | None = None) -> None:
        """`synthetic_rates`: accept drafts at these rates, regardless of their tokens; for benchmarks only."""
        self._always_invariant = always_invariant
        self._synthetic_rates = synthetic_rates
        if synthetic_rates is not None:
            logger.warning(
                "synthetic acceptance: drafts are accepted at the rates %s whatever they are; the text is meaningless",
                ", ".join(f"{rate:g}" for rate in synthetic_rates),
            )

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[RowResult]:
        """Sample and verify.

        Args:
            logits: [sum(1 + k), V] float32, raw; may be overwritten.
            rows: the sequences in the order of their logits rows.
        """
        if (
            use_triton(logits)
            or self._synthetic_rates is not None
            or not all(row.request.sampling.is_plain for row in rows)
        ):
            return self.launch(logits, rows).collect()
        if not any(row.request.sampling.edits_logits for row in rows):
            return _most_likely(logits, rows)
        raw_tops = logits.amax(dim=-1).tolist()  # NaN if any logit is
        self._edit(logits, rows, _starts(rows))
        return _most_likely(logits, rows, raw_tops)

    def begin(self, logits: Tensor, rows: Sequence[SampleRow], overshoot: Tensor | None = None) -> Sampling:
        """Start to sample without waiting for the device, if possible.

        Args:
            overshoot: [B] int64 on the device: by how much the rows' `num_tokens` are too large; None: 0.
        """
        if use_triton(logits) and self._synthetic_rates is None:
            return self.launch(logits, rows, overshoot)
        if overshoot is not None:
            rows = [row.settled(by) for row, by in zip(rows, overshoot.tolist(), strict=True)]
        return Sampled(self(logits, rows), [1 + len(row.drafts.token_ids) for row in rows], logits.device)

    def launch(
        self, logits: Tensor, rows: Sequence[SampleRow], overshoot: Tensor | None = None
    ) -> Pending | PendingTokens:
        """Sample and verify; on a GPU the host waits in `Pending.collect` alone. For the arguments see `begin`."""
        raw_top = logits.amax(dim=-1)
        has_drafts = any(row.drafts.token_ids for row in rows)
        if not has_drafts and all(
            row.request.sampling.is_plain and not row.request.sampling.edits_logits for row in rows
        ):
            choices = choose_most_likely(logits)
            return PendingTokens(rows, choices, Download([choices.token_ids, raw_top]), logits.shape[1])
        starts = _starts(rows)
        wanting = [i for i, row in enumerate(rows) if row.request.params.logprobs is not None]
        reported = [starts[i] + j for i in wanting for j in range(1 + len(rows[i].drafts.token_ids))]
        if reported:
            index = upload(logits.device, np.array(reported, dtype=np.int64))[0]
            raw = logits[index]  # a copy: edits and filters work in place
        edited = self._edit(logits, rows, starts)
        filtered = self._filter(logits, rows)
        verify_rows = [self._verify_row(row, logits.shape[1]) for row in rows]
        choices, top = self._choose(filtered, verify_rows, overshoot)
        if top is None:
            top = filtered.amax(dim=-1) if edited or filtered is not logits else raw_top
        if not has_drafts and not wanting:
            return PendingTokens(rows, choices, Download([choices.token_ids, raw_top, top]), logits.shape[1])
        parts = [*choices, raw_top, top]
        if reported:
            k = max(rows[i].request.params.logprobs or 0 for i in wanting)
            parts += top_logprobs(raw, choices.token_ids[index].clamp(min=0), k)
            lists = [rows[i].request.params.logprob_token_ids or [] for i in wanting]
            given = given_ids(lists, [1 + len(rows[i].drafts.token_ids) for i in wanting])
            if given.shape[1]:
                parts += logprobs_at(raw, upload(logits.device, given.reshape(-1))[0].view(given.shape))
        return Pending(rows, verify_rows, wanting, (*choices, raw_top, top), Download(parts), logits.shape[1])

    def _edit(self, logits: Tensor, rows: Sequence[SampleRow], starts: list[int]) -> bool:
        """Apply the edits in place; returns whether there were any."""
        edited = [
            LogitsRow(starts[i] + j, row.request, (row.drafts.token_ids[:j],), row.num_tokens, row.seen)
            for i, row in enumerate(rows)
            if row.request.sampling.edits_logits
            for j in range(len(row.drafts.token_ids) + 1)
        ]
        if edited:
            apply_edits(logits, edited)
        return bool(edited)

    def _filter(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        params = [row.request.params for row in rows for _ in range(len(row.drafts.token_ids) + 1)]
        if all(p.greedy for p in params):
            return logits
        return filter_logits(
            logits,
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        )

    def _choose(self, logits: Tensor, rows: list[VerifyRow], overshoot: Tensor | None) -> tuple[Choices, Tensor | None]:
        """Tokens, and the largest of each row's filtered `logits` if known."""
        if self._synthetic_rates is not None:
            return choose_synthetic(logits, rows, self._synthetic_rates), None
        has_stats = use_triton(logits) and any(row.rule is not Rule.GREEDY for row in rows)
        stats = row_stats(logits) if has_stats else None
        return choose(logits, rows, stats, overshoot), None if stats is None else stats[0]

    def _verify_row(self, row: SampleRow, num_columns: int) -> VerifyRow:
        request, probs = row.request, row.drafts.probs
        if probs is not None:  # a step with an adapter that adds tokens has more columns than drafters know
            probs = F.pad(probs, (0, num_columns - probs.shape[1]))
        rule = choose_rule(request, self._always_invariant)
        num_tokens = len(request.tokens) if row.num_tokens is None else row.num_tokens
        return VerifyRow(request.seed_key, num_tokens, row.drafts.token_ids, probs, rule)


class Pending(NamedTuple):
    """A step's sampling, launched and not waited for."""

    rows: Sequence[SampleRow]
    verify_rows: list[VerifyRow]
    wanting: list[int]
    """The sequences that want log-probabilities."""
    chosen: tuple[Tensor, Tensor, Tensor, Tensor]
    """On the device: `Choices`, and [sum(1 + k)] each row's largest logit, raw and after filtering."""
    download: Download
    num_tokens: int
    """Columns of the logits."""

    def outcome(self) -> DeviceOutcome:
        """Outcome on the device, as `collect` will return it. If a row has no allowed token it is any token."""
        token_ids, accepted, raw_top, top = self.chosen
        tokens = token_ids.clamp(0, self.num_tokens - 1)
        num_drafts = np.array([len(row.drafts.token_ids) for row in self.rows])
        most = int(num_drafts.max())
        if not most:
            return DeviceOutcome(tokens, tokens, accepted, None)  # a row each
        starts = np.array(_starts(self.rows))
        rows = starts[:, None] + np.minimum(np.arange(1 + most), num_drafts[:, None])
        first, given, index = upload(tokens.device, starts, num_drafts, rows.reshape(-1))
        # As in `_reached`: the row before the first without an allowed token gave the new token.
        usable = (raw_top.isfinite() & top.isfinite()).index_select(0, index).view(len(starts), -1)
        sound = usable.to(torch.int64).cumprod(1).sum(1)
        accepted = torch.minimum(accepted, (sound - 1).clamp_(min=0))
        rejected = torch.cat((given - accepted, given.new_zeros(1)))
        last = tokens.index_select(0, first + accepted)
        counts = (1 + num_drafts).tolist()
        return DeviceOutcome(tokens, last, accepted, rejected, counts=counts)

    def collect(self) -> list[RowResult]:
        """Wait for the device, and return each sequence's result."""
        tokens, accepted, raw_top, top, *reports = self.download.wait()
        tops = list(zip(raw_top, top, strict=True))
        verified = as_verified(self.verify_rows, tokens, accepted)
        sampled = [
            _reached(row.request, got, tops[start : start + len(got.token_ids)])
            for row, start, got in zip(self.rows, _starts(self.rows), verified, strict=True)
        ]
        place = 0
        for i in self.wanting:
            row, got = self.rows[i], sampled[i].token_ids
            if got:
                k = row.request.params.logprobs or 0
                own = slice(place, place + len(got))
                positions = as_logprobs(got, k, *(part[own] for part in reports[:4]))
                ids = row.request.params.logprob_token_ids
                if ids:
                    positions = with_given(ids, positions, *(part[own] for part in reports[4:]))
                sampled[i] = sampled[i]._replace(logprobs=positions)
            place += 1 + len(row.drafts.token_ids)
        return sampled


class PendingTokens(NamedTuple):
    """`Pending` of rows without drafts and log-probabilities: each gets one token."""

    rows: Sequence[SampleRow]
    chosen: Choices
    download: Download
    """Tokens [B], max raw logit, max logit after filtering."""
    num_tokens: int

    def outcome(self) -> DeviceOutcome:
        """See `Pending`."""
        tokens = self.chosen.token_ids.clamp(0, self.num_tokens - 1)
        return DeviceOutcome(tokens, tokens, self.chosen.num_accepted, None)

    def collect(self) -> list[RowResult]:
        """See `Pending`."""
        return _one_each(self.rows, *self.download.wait())


class Sampled(NamedTuple):
    """Results that need no wait."""

    sampled: list[RowResult]
    counts: list[int]
    """By sequence, its rows of logits: 1 + k."""
    device: torch.device

    def outcome(self) -> DeviceOutcome:
        """See `Pending`."""
        tokens = [
            token
            for got, count in zip(self.sampled, self.counts, strict=True)
            for token in (got.token_ids + [0] * count)[:count]
        ]
        last = [got.token_ids[-1] if got.token_ids else 0 for got in self.sampled]
        accepted = np.array([got.num_accepted for got in self.sampled])
        most = max(self.counts) - 1
        left = np.append(np.array(self.counts) - 1 - accepted, 0)
        arrays = np.array(tokens), np.array(last), accepted, left
        there, next_tokens, right, rejected = upload(self.device, *arrays)
        left_of = rejected if most else None
        return DeviceOutcome(there, next_tokens, right, left_of, counts=self.counts)

    def collect(self) -> list[RowResult]:
        """Tokens that each sequence got."""
        return self.sampled


Sampling = Pending | PendingTokens | Sampled
"""A step's sampling: `outcome` on the device, and `collect` for the host."""


def _reached(request: Request, got: Verified, tops: Sequence[tuple[float, float]]) -> RowResult:
    """Tokens of `got` before the first row without an allowed token; an error if that is the first row.

    `tops`: for each row that chose a token, the largest raw logit, and the largest after filtering. A later such row
    ends the step before it, and is the next step's first: the same text, and then the same error, as without drafts.
    """
    if request.grammar is not None and request.grammar.is_deferred:
        return RowResult([], is_deferred=True)
    dead = next((j for j, pair in enumerate(tops) if not all(map(math.isfinite, pair))), None)
    if dead is None:
        return RowResult(got.token_ids, got.num_accepted)
    if dead > 0:
        # The last token counts as the new one, not as an accepted draft: so the next step has it to compute.
        return RowResult(got.token_ids[:dead], dead - 1)
    emptied = math.isfinite(tops[0][0]) and tops[0][1] == -math.inf
    return RowResult([], error=(no_choice(request) if emptied else not_finite(request)).info())


def _one_each(rows: Sequence[SampleRow], tokens: list[int], *tops: list[float]) -> list[RowResult]:
    """Results of rows without drafts, which got a token each; for the first and the last of `tops` see `_reached`."""
    if all(map(math.isfinite, chain(*tops))):
        return [RowResult([token]) for token in tokens]
    return [
        _reached(row.request, Verified([token], 0), [(of_row[0], of_row[-1])])
        for row, token, *of_row in zip(rows, tokens, *tops, strict=True)
    ]


def _most_likely(logits: Tensor, rows: Sequence[SampleRow], raw_tops: list[float] | None = None) -> list[RowResult]:
    """Result of the general path for plain rows, without its many small operations, which take host time at batch 1.

    `raw_tops`: largest logit of each row before edits, if there were some.
    """
    tokens, tops = most_likely(logits)
    if len(tokens) == len(rows):
        return _one_each(rows, tokens, tops if raw_tops is None else raw_tops, tops)
    pairs = list(zip(tops if raw_tops is None else raw_tops, tops, strict=True))
    sampled, start = [], 0
    for row in rows:
        drafts = row.drafts.token_ids
        end = start + 1 + len(drafts)
        got = accept_equal(drafts, tokens[start:end]) if drafts else Verified(tokens[start:end], 0)
        sampled.append(_reached(row.request, got, pairs[start : start + len(got.token_ids)]))
        start = end
    return sampled


def _starts(rows: Sequence[SampleRow]) -> list[int]:
    starts, total = [], 0
    for row in rows:
        starts.append(total)
        total += 1 + len(row.drafts.token_ids)
    return starts
