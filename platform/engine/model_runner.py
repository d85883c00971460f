"""Runs one planned step on the device: build the batch, forward, sample and verify, propose."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.batch import ForwardBatch, LayerKV, SequenceRows, build_batch
from ...models.decoder import Decoder, DecoderOutput
from ...models.graphs import PassGraphs, PassInputs
from ...spec_decode.proposer import AdapterPreparer, DraftRow, Proposer, TargetOutput
from ..core.batch import RowPlan, RowResult, StepPlan, StepResult
from ..core.messages import TokenLogprobs
from ..core.request import Request
from .sampler import Sampled, Sampler, SampleRow, not_finite, token_logprobs

LOGITS_CHUNK = 128
"""Rows of prompt logits made at once: they are [rows, vocabulary] in float32."""


class RunnerParts(NamedTuple):
    """What a runner is composed of."""

    model: Decoder
    kv: list[LayerKV]
    """The target's layers."""
    sampler: Sampler
    proposer: Proposer
    prepare_adapters: AdapterPreparer
    """For the tokens of a forward pass."""
    prepare_head: AdapterPreparer
    """For rows of logits: 1 + k of a request that verifies k drafts, a prompt's positions for its log-probabilities."""
    graphs: PassGraphs | None = None
    """For decodes and verifications; None: every pass is launched piece by piece."""


class _Computed(NamedTuple):
    """A plan's forward pass."""

    output: DecoderOutput
    logits: Tensor | None
    """[T, V] float32 where every token of the step has them; good until the next pass."""


class ModelRunner:
    """Executes step plans. Keeps nothing between steps but the model and the KV memory."""

    def __init__(self, parts: RunnerParts) -> None:
        self._model = parts.model
        self._kv = parts.kv
        self._sampler = parts.sampler
        self._proposer = parts.proposer
        self._aux_layers = parts.proposer.needs.aux_layers
        self._prepare_adapters = parts.prepare_adapters
        self._prepare_head = parts.prepare_head
        self._graphs = parts.graphs
        self._passes = None
        if parts.graphs is not None:
            preparers = [parts.prepare_adapters, parts.prepare_head]
            self._passes = parts.graphs.of(parts.model, parts.kv, self._compute, preparers)
            vocab_size = parts.model.config.vocab_size
            shape = (parts.graphs.limits.max_tokens, vocab_size) if self._passes is not None else (0, vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=parts.model.device)

    @property
    def captures(self) -> bool:
        """Whether passes are captured in graphs."""
        return self._passes is not None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. Does not change requests: `Scheduler.commit` does."""
        if not plan.rows:
            return StepResult([])
        started = time.perf_counter() - self._capture_seconds
        computed = self._forward(plan)
        hidden, offsets = computed.output.hidden, _offsets(plan)
        sampled = self._sample(plan, computed)
        prompt_logprobs = [
            self._prompt_logprobs(row, hidden[offset : offset + row.num_tokens])
            for row, offset in zip(plan.rows, offsets, strict=True)
        ]
        sampled = [
            _without_nan(row.request, got, prompt)
            for row, got, prompt in zip(plan.rows, sampled, prompt_logprobs, strict=True)
        ]
        rows = [_draft_row(*parts) for parts in zip(plan.rows, sampled, offsets, strict=True)]
        seconds = time.perf_counter() - self._capture_seconds - started
        drafts = self._proposer.propose(rows, TargetOutput(hidden, computed.output.aux, seconds))
        return StepResult(
            [
                RowResult(got.token_ids, got.num_accepted, got.logprobs, prompt, draft, computed, got.error)
                for got, prompt, (draft, computed) in zip(sampled, prompt_logprobs, drafts, strict=True)
            ],
            time.perf_counter() - self._capture_seconds - started,
        )

    @property
    def _capture_seconds(self) -> float:
        """Spent so far on what only first steps pay for."""
        return 0.0 if self._graphs is None else self._graphs.capture_seconds

    def _forward(self, plan: StepPlan) -> _Computed:
        rows = SequenceRows(
            token_ids=[token for row in plan.rows for token in _input_tokens(row)],
            query_lens=[row.num_tokens for row in plan.rows],
            starts=[row.start for row in plan.rows],
            block_tables=[row.request.blocks for row in plan.rows],
        )
        handles = [(row.request.adapter, row.num_tokens) for row in plan.rows]
        if self._passes is not None and all(row.samples and row.num_tokens == 1 + row.num_drafts for row in plan.rows):
            found = self._passes.run(rows, handles)
            if found is not None:
                logits, *states = (part[: len(rows.token_ids)] for part in found)
                hidden, *aux = (state.clone() for state in states)  # whoever drafts may keep them
                return _Computed(DecoderOutput(hidden, tuple(aux)), logits)
        batch = build_batch(rows, self._model, self._kv, self._prepare_adapters(handles))
        return _Computed(self._model.forward(batch, self._aux_layers), None)

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """What is captured: logits of all tokens, hidden states, and those that the proposer wants."""
        output = self._model.forward(batch, self._aux_layers)
        logits = self._model.compute_logits(output.hidden, inputs.adapters[1], out=self._logits[: len(output.hidden)])
        return logits, output.hidden, *output.aux

    def _sample(self, plan: StepPlan, computed: _Computed) -> list[Sampled]:
        """Aligned with the plan's rows; nothing for those that do not reach their end."""
        hidden = computed.output.hidden
        index: list[int] = []
        chosen: list[SampleRow] = []
        for row, offset in zip(plan.rows, _offsets(plan), strict=True):
            if row.samples:
                end = offset + row.num_tokens
                index.extend(range(end - 1 - row.num_drafts, end))
                chosen.append(SampleRow(row.request, row.request.drafts))
        if not chosen:
            return [Sampled([], 0)] * len(plan.rows)
        logits = computed.logits
        if logits is None:
            picked = hidden if len(index) == len(hidden) else hidden[torch.tensor(index, device=hidden.device)]
            handles = [(row.request.adapter, 1 + row.num_drafts) for row in plan.rows if row.samples]
            logits = self._model.compute_logits(picked, self._prepare_head(handles))
        results = iter(self._sampler(logits, chosen))
        return [next(results) if row.samples else Sampled([], 0) for row in plan.rows]

    def _prompt_logprobs(self, row: RowPlan, hidden: Tensor) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt tokens that follow this chunk's positions, maybe none; None when not asked
        for."""
        request = row.request
        k, last = request.params.prompt_logprobs, request.num_prompt_tokens - 1
        if k is None or request.num_output_tokens > 0:
            return None
        found: list[TokenLogprobs] = []
        for start in range(row.start, min(row.end, last), LOGITS_CHUNK):
            end = min(start + LOGITS_CHUNK, row.end, last)
            adapters = self._prepare_head([(request.adapter, end - start)])
            logits = self._model.compute_logits(hidden[start - row.start : end - row.start], adapters)
            found += token_logprobs(logits, request.tokens[start + 1 : end + 1], k)
        return found


def _without_nan(request: Request, got: Sampled, prompt: list[TokenLogprobs] | None) -> Sampled:
    """`got`, or the request's error: logits of its prompt that it wants to be told of are not finite."""
    if got.error is None and prompt and any(math.isnan(entry.logprobs[0]) for entry in prompt):
        return Sampled([], 0, error=not_finite(request).info())
    return got


def _offsets(plan: StepPlan) -> list[int]:
    """Where each row begins among the step's tokens."""
    offsets, total = [], 0
    for row in plan.rows:
        offsets.append(total)
        total += row.num_tokens
    return offsets


def _input_tokens(row: RowPlan) -> list[int]:
    request, known_end = row.request, row.end - row.num_drafts
    tokens = request.tokens[row.start : known_end]
    return tokens + request.drafts.token_ids if row.num_drafts else tokens


def _draft_row(row: RowPlan, got: Sampled, offset: int) -> DraftRow:
    request = row.request
    return DraftRow(
        request=request,
        tokens=request.tokens + got.token_ids if got.token_ids else request.tokens,
        num_valid=row.end - (row.num_drafts - got.num_accepted),
        num_draft_valid=min(request.num_draft_computed, _accepted_end(request, got)),
        max_drafts=0 if got.error is not None else row.max_new_drafts,
        block_table=request.blocks,
        sampled=bool(got.token_ids),
        start=row.start,
        first_index=offset,
        num_drafts=row.num_drafts,
        num_accepted=got.num_accepted,
    )


def _accepted_end(request: Request, got: Sampled) -> int:
    """One past the last position whose token is what the proposer saw: later ones held rejected drafts."""
    return len(request.tokens) + got.num_accepted
