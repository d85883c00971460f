"""Runs one planned step on the device: build the batch, forward, sample and verify, draft."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import DeviceOutcome
from ....kernels.staging import to_device
from ....models.batch import AdapterPreparer, LayerKV
from ....models.model import DecoderOutput, LanguageModel
from ....models.pass_graphs import PassGraphs
from ....spec_decode.control.policy import SpeculationPolicy
from ....spec_decode.drafters.base import (
    DeviceStep,
    Drafter,
    DraftRow,
    NoDrafter,
    Proposal,
    TargetOutput,
)
from ...core.batch import Move, RowPlan, RowResult, StepPlan, StepResult
from ...core.messages import TokenLogprobs
from ...core.request import NO_DRAFTS, Drafts, Request, Status
from ..executor.base import Executor
from ..memory.host_store import HostStore
from ..sampling.grammar_masks import with_forced
from ..sampling.logits_edits import edit_state
from ..sampling.reported_logprobs import token_logprobs
from ..sampling.sampler import Sampler, Sampling, not_finite
from .device_queue import DeviceQueue, DeviceStopwatch, Done
from .pooling import pooled_part
from .step_inputs import StepInputs, continued, drafting_rows, of_rows, prepare

LOGITS_CHUNK = 128
"""Rows of prompt logits computed at once: they are [rows, vocabulary] in float32."""


class RunnerParts(NamedTuple):
    """Parts of a runner."""

    model: LanguageModel
    kv: list[LayerKV]
    """The target's layers."""
    sampler: Sampler
    drafter: Drafter
    executor: Executor
    """Computes all passes of the target."""
    prepare_head: AdapterPreparer
    """Prepares adapters for a classifier's score matrix."""
    queue: DeviceQueue
    """Runs the work of steps in order."""
    graphs: PassGraphs | None = None
    """Holder of the executor's captured passes and the drafter's; None: every pass is launched kernel by kernel."""
    policy: SpeculationPolicy | None = None
    """Chooses numbers of drafts and observes each step; None: they are fixed."""
    host: HostStore | None = None
    """Makes the plans' copies of KV blocks; None: plans have none."""


class _Computed(NamedTuple):
    """A plan's forward pass."""

    output: DecoderOutput
    logits: Tensor | None
    """[T, V] float32 if every token of the step has logits; valid until the next pass."""


class _Queued(NamedTuple):
    """Results of a step's work; sampled tokens and drafts may still be on their way to the host."""

    output: DecoderOutput
    sampling: Sampling | None
    """None: no row reaches its end."""
    prompts: dict[int, list[TokenLogprobs] | Tensor]
    """`RowResult.prompt_logprobs` or `pooled`, by row, if wanted."""
    outcome: DeviceOutcome | None
    """Outcome of the sampled rows; None if no step is launched before the host knows it."""
    proposals: list[Proposal] | None
    """Proposal of each row, if the device drafted without the host."""
    stopwatch: DeviceStopwatch
    """Time of the forward pass, sampling and verification."""


@dataclass(slots=True)
class Launched:
    """A step in flight."""

    plan: StepPlan
    work: Future[_Queued] | Done[_Queued]
    sampled_index: dict[Request, int]
    """Index of each request among the sampled rows."""
    block_tables: Sequence[Sequence[int]]
    """KV blocks of each row, also of a sequence that has since finished."""


class ModelRunner:
    """Executes step plans. Between steps it keeps only the model and the KV memory."""

    def __init__(self, parts: RunnerParts) -> None:
        self._model = parts.model
        self._kv = parts.kv
        self._sampler = parts.sampler
        self._drafter = parts.drafter
        self._policy = parts.policy
        self._queue = parts.queue
        self._has_drafter = not isinstance(parts.drafter, NoDrafter)
        needs = parts.drafter.needs
        self._drafter_lags = needs.lags
        self._drafts_on_device = needs.drafts_on_device
        self._aux_layers = needs.aux_layers
        self._executor = parts.executor
        self._prepare_head = parts.prepare_head
        self._graphs = parts.graphs
        self._host = parts.host

    @property
    def model(self) -> LanguageModel:
        """The target."""
        return self._model

    @property
    def overlaps(self) -> bool:
        """True when a step may be launched while another one runs."""
        return self._queue.overlaps

    def launch(self, plan: StepPlan, before: Launched | None = None) -> Launched:
        """Launch a step after those launched before; `plan` has rows. Errors are raised by `collect`.

        Args:
            before: The step in flight, whose tokens the rows of `plan` continue.
        """
        drafts = plan.can_overlap_next and self._drafts_on_device
        prepared = prepare(plan, {} if before is None else before.sampled_index, drafts=drafts)
        earlier = before.work if before is not None and prepared.followed else None
        work = self._queue.submit(lambda: self._work(prepared, earlier, plan.can_overlap_next, plan.moves))
        sampled_index = {row.request: index for index, row in enumerate(prepared.chosen)}
        return Launched(plan, work, sampled_index, prepared.rows.block_tables)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step. Does not change requests: `Scheduler.commit` does."""
        plan, queued = launched.plan, launched.work.result()
        rows = [*queued.sampling.collect()] if queued.sampling is not None else []
        if len(rows) < len(plan.rows):
            sampled = iter(rows)
            rows = [next(sampled) if row.samples else RowResult([]) for row in plan.rows]
        for index, prompt in queued.prompts.items():
            rows[index] = _with_prompt(plan.rows[index].request, rows[index], prompt)
        return StepResult(rows, queued.stopwatch.seconds(), queued.stopwatch.gap())

    @torch.inference_mode()
    def draft(self, launched: Launched, result: StepResult) -> float:
        """Give the sequences of a committed step their drafts for the next one: the device's, if it drafted without the
        host. Returns the seconds of the step and of drafting."""
        plan, queued = launched.plan, launched.work.result()
        started = time.perf_counter()
        proposals = queued.proposals
        if self._has_drafter:
            if proposals is None:
                offsets = accumulate((row.num_tokens for row in plan.rows), initial=0)
                parts = zip(plan.rows, result.rows, launched.block_tables, offsets, strict=False)
                is_rated = self._policy is not None and self._policy.reads_confidence
                proposals = self._draft([_draft_row(*part, is_rated) for part in parts], TargetOutput(*queued.output))
            for row, proposal in zip(plan.rows, proposals, strict=True):
                request, num_computed = row.request, proposal.num_draft_computed
                if request.status is not Status.RUNNING:
                    continue
                if queued.proposals is not None:  # the host does not know how many tokens the device drafted after
                    num_computed = len(request.tokens) if num_computed else request.num_draft_computed
                request.drafts, request.num_draft_computed = proposal.drafts, num_computed
        _propose_forced([row for row in plan.rows if row.samples])
        if not self._has_drafter:
            return result.seconds
        if self._policy is not None:
            self._policy.observe(plan, result)
        return result.seconds + time.perf_counter() - started

    def _draft(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts for the next step, made with the step's results on the host."""
        if any(row.max_drafts for row in rows):
            return self._drafter.propose(rows, target)
        self._drafter.watch(rows, target)
        if self._drafter_lags:
            return [Proposal(NO_DRAFTS, row.num_draft_valid) for row in rows]
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        self._queue.drain()

    def close(self) -> None:
        """Wait, stop the thread that computes, if there is one, and drop the graphs. No step comes after this."""
        self._queue.close()
        if self._graphs is not None:
            self._graphs.clear()

    @torch.inference_mode()
    def _work(
        self,
        prepared: StepInputs,
        before: Future[_Queued] | Done[_Queued] | None,
        can_overlap_next: bool,
        moves: Sequence[Move],
    ) -> _Queued:
        """Compute a step on the device. On a GPU only log-probabilities of prompts make the host wait for it.

        Args:
            before: The step that rows which await a token continue; its work is done.
            can_overlap_next: True if another step may follow before the host knows the outcome.
            moves: Copies of KV blocks that are made first.
        """
        if self._host is not None and moves:
            self._drafter.flush()
            self._host.run(moves)
        stopwatch = self._queue.stopwatch()
        if before is not None:
            queued = before.result()
            assert queued.outcome is not None, "the step before was not planned with can_overlap_next"
            prepared = continued(prepared, queued.outcome, queued.proposals or ())
        computed = self._forward(prepared)
        overshoot = of_rows(prepared.rows.overshoot, prepared.sampling, len(prepared.handles))
        sampling = self._sample(prepared, computed, overshoot)
        outcome = proposals = None
        if sampling is not None and can_overlap_next:
            outcome = sampling.outcome()
            outcome = outcome._replace(overshoot=overshoot)
        prompts = {
            index: self._prompt_part(row, computed.output.hidden[first : first + row.num_tokens])
            for index, (row, first) in prepared.prompts.items()
        }
        stopwatch.stop()  # tokens are delivered while the device drafts
        if prepared.drafting:
            proposals = self._draft_on_device(prepared, computed.output, outcome)
        return _Queued(computed.output, sampling, prompts, outcome, proposals, stopwatch)

    def _draft_on_device(
        self, prepared: StepInputs, output: DecoderOutput, outcome: DeviceOutcome | None
    ) -> list[Proposal]:
        """Drafts, if any are wanted, made before the host has the step's results."""
        rows, step = prepared.drafting, DeviceStep(outcome, prepared.rows.overshoot)
        target = TargetOutput(output.hidden, output.aux, step)
        if not any(row.max_drafts for row in rows):
            self._drafter.watch(rows, target)
            return [Proposal(NO_DRAFTS, 0) for _ in rows]
        assert outcome is not None, "rows with drafts reach their end"
        return self._drafter.propose(drafting_rows(prepared, outcome), target)

    def _forward(self, prepared: StepInputs) -> _Computed:
        rows, handles = prepared.rows, prepared.handles
        found = self._executor.replay(rows, handles, verifies=prepared.replayable)
        if found is not None:
            states = [part[: len(rows.token_ids)] for part in found]
            logits = states.pop(0) if prepared.replayable else None
            hidden, *aux = (state.clone() for state in states) if self._has_drafter else states  # it may keep them
            return _Computed(DecoderOutput(hidden, tuple(aux)), logits)
        return _Computed(self._executor.forward(rows, handles, self._aux_layers), None)

    def _sample(self, prepared: StepInputs, computed: _Computed, overshoot: Tensor | None) -> Sampling | None:
        """Sample the rows whose last token is computed, in their order; None if there are none. `overshoot`: theirs."""
        hidden, index, chosen = computed.output.hidden, prepared.with_logits, prepared.chosen
        if not chosen:
            return None
        logits = computed.logits
        if logits is None:
            picked = hidden if len(index) == len(hidden) else hidden[to_device(np.array(index), hidden.device)]
            handles = [
                handle
                for row in chosen
                for handle in row.request.handles(row.request.num_prompt_tokens - 1, 1 + len(row.drafts.token_ids))
            ]
            logits = self._executor.logits(picked, handles)
        return self._sampler.begin(logits, chosen, overshoot)

    def _prompt_part(self, row: RowPlan, hidden: Tensor) -> list[TokenLogprobs] | Tensor:
        """Log-probabilities of a chunk of a prompt, or its part of the pooled hidden [H], whichever is wanted."""
        pooling = row.request.params.pooling
        if pooling is None:
            return self._prompt_logprobs(row, hidden)
        return pooled_part(pooling, row, hidden, self._model.score, self._prepare_head)

    def _prompt_logprobs(self, row: RowPlan, hidden: Tensor) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt tokens after this chunk's positions, maybe none."""
        request = row.request
        last = request.num_prompt_tokens - 1
        found: list[TokenLogprobs] = []
        for start in range(row.start, min(row.end, last), LOGITS_CHUNK):
            end = min(start + LOGITS_CHUNK, row.end, last)
            handles = request.handles(start, end - start)
            logits = self._executor.logits(hidden[start - row.start : end - row.start], handles)
            found += token_logprobs(logits, request.tokens[start + 1 : end + 1], request.params.prompt_logprobs or 0)
        return found


def _with_prompt(request: Request, got: RowResult, prompt: list[TokenLogprobs] | Tensor) -> RowResult:
    """`got` with the log-probabilities of the request's prompt, or its pooled hidden states; the request's error if
    these are not finite."""
    if isinstance(prompt, Tensor):
        return (
            RowResult([], pooled=prompt) if prompt.isfinite().all() else RowResult([], error=not_finite(request).info())
        )
    if got.error is None and any(math.isnan(entry.logprobs[0]) for entry in prompt):
        return RowResult([], error=not_finite(request).info())
    return got._replace(prompt_logprobs=prompt)


def _propose_forced(rows: Sequence[RowPlan]) -> None:
    """Replace the drafts of sequences with grammars by their forced tokens, if any, and end those of reasoning when its
    tokens are used up. `rows`: the sampled ones; a prompt's grammar starts with the step that has its last chunk."""
    requests = [row.request for row in rows if row.request.status is Status.RUNNING]
    for request in requests:
        if request.params.thinking_token_budget is not None and request.params.max_drafts != 0:
            thinking = edit_state(request).thinking
            assert thinking is not None, "its parameters have a bound"
            _replace_drafts(request, thinking.within_budget(request, request.drafts))
    requests = [request for request in requests if request.grammar is not None]
    if not requests:
        return
    drafts = with_forced(requests, [request.drafts for request in requests])
    for request, found in zip(requests, drafts, strict=True):
        _replace_drafts(request, found)


def _replace_drafts(request: Request, drafts: Drafts) -> None:
    if drafts is not request.drafts:  # the drafter has not computed these
        request.num_draft_computed = min(request.num_draft_computed, len(request.tokens))
        request.drafts = drafts


def _draft_row(row: RowPlan, got: RowResult, block_table: Sequence[int], first_index: int, is_rated: bool) -> DraftRow:
    """The row as drafters see it, after its commit."""
    request = row.request
    return DraftRow(
        request=request,
        tokens=request.tokens,
        num_valid=min(row.end - (row.num_drafts - got.num_accepted), len(request.tokens)) - got.is_deferred,
        num_draft_valid=request.num_draft_computed,
        max_drafts=0 if got.is_deferred or request.status is not Status.RUNNING else row.max_new_drafts,
        block_table=block_table,
        sampled=bool(got.token_ids),
        start=row.start,
        first_index=first_index,
        num_drafts=row.num_drafts,
        num_accepted=got.num_accepted,
        drafter=row.drafter,
        is_rated=is_rated,
    )
