"""Speculation that pays: decides for every row who drafts for it and how much, from what was measured so far.

    propose(rows, target)
      take in      what this step took, which drafts were accepted
      decide       every few steps: drafter and k of each row            (controller, goodput, step_costs, acceptance)
      draft        every drafter sees every row; rows that it does not serve have max_drafts 0
      merge        a row's drafts are its drafter's; num_draft_computed is the neural drafter's, whose KV it counts

Text does not depend on any of this: whatever is drafted is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from ..platform.core.request import Request, Status
from ..platform.core.speculative_config import MODEL_METHODS, SpeculativeConfig
from .controller import Controller, DrafterTraits, RowState
from .ngram import NgramProposer
from .proposer import AdapterPreparer, DraftRow, Proposal, Proposer, ProposerNeeds, TargetOutput
from .step_costs import MIXED, DraftSize

if TYPE_CHECKING:
    from ..models.batch import LayerKV

_USUAL_LAG = 2
"""Tokens that a drafter computes anyway before its first draft: the newest one, and one whose draft was the last."""
_LONGEST_GAP = 1.0
"""Seconds between two steps after which the engine was idle, not slow."""


def make_adaptive(proposer: Proposer, config: SpeculativeConfig) -> AdaptiveProposer:
    """`proposer` under the controller, with prompt lookup to fall back on where `proposer` is neural."""
    drafters = [(DrafterTraits(config.method, has_passes=config.method in MODEL_METHODS), proposer)]
    if drafters[0][0].has_passes:
        lookup = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        drafters.append((DrafterTraits("ngram", has_passes=False), lookup))
    return AdaptiveProposer(drafters, config.num_speculative_tokens)


class AdaptiveProposer:
    """Drafters composed into one. The first is the one asked for, and the only one that may own layers."""

    def __init__(
        self,
        drafters: Sequence[tuple[DrafterTraits, Proposer]],
        max_drafts: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_drafts`: for any row; `clock`: seconds."""
        self._drafters = [proposer for _, proposer in drafters]
        self._clock = clock
        self._controller = Controller([traits for traits, _ in drafters], max_drafts)
        self._states: dict[Request, RowState] = {}  # of live requests only
        self._batch: list[Request] = []
        self._ended: float | None = None  # when the last step's drafting did

    @property
    def needs(self) -> ProposerNeeds:
        """Those of the first drafter; the fallback needs nothing."""
        return self._drafters[0].needs

    @property
    def controller(self) -> Controller:
        """What decides; to be read only."""
        return self._controller

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """For all drafters."""
        for drafter in self._drafters:
            drafter.bind(kv, prepare_adapters)

    def forget_adapter(self, digest: bytes) -> None:
        """For all drafters, and the estimates of its acceptance."""
        for drafter in self._drafters:
            drafter.forget_adapter(digest)
        self._controller.forget(digest)

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts by the drafter and of the number that promise the best goodput; maybe none."""
        began = self._clock()
        batch = [row.request for row in rows]
        changed = batch != self._batch
        if changed:
            self._batch = batch
            self._update_states(batch)
        states = [self._states[request] for request in batch]
        prompt_tokens = self._take_in(rows, states, target.seconds)
        num_sampling = sum(row.sampled for row in rows)
        if num_sampling and self._controller.due(num_sampling, prompt_tokens > 0):
            self._decide(rows, states, prompt_tokens)
        proposals = self._draft(rows, states, target, changed)
        ended = self._clock()
        if self._ended is not None:
            gap = began - target.seconds - self._ended
            if gap < _LONGEST_GAP:
                self._controller.costs.add_gap(gap)
        self._controller.stepped(target.seconds + ended - began)
        self._ended = ended
        return proposals

    def snapshot(self) -> dict[Hashable, dict[str, object]]:
        """What the controller thinks of each adapter, by its content's digest (b"" is the base model)."""
        return self._controller.snapshot()

    # ------------------------------------------------------------------ evidence

    def _update_states(self, batch: Sequence[Request]) -> None:
        for request in [request for request in self._states if request.status is Status.FINISHED]:
            del self._states[request]
        for request in batch:
            if request not in self._states:
                self._states[request] = RowState(self._controller.lane(request.text_namespace[1]))

    def _take_in(self, rows: Sequence[DraftRow], states: Sequence[RowState], seconds: float) -> int:
        """Learn from the step; returns how many tokens were computed of rows that are not through their prompt."""
        controller = self._controller
        num_tokens = prompt_tokens = 0
        mixed = False
        for row, state in zip(rows, states, strict=True):
            computed = row.num_valid + row.num_drafts - row.num_accepted - row.start
            num_tokens += computed
            if not row.sampled:
                prompt_tokens += computed
            mixed = mixed or computed != 1 + row.num_drafts
            if row.num_drafts:
                controller.verified(state, row.num_drafts, row.num_accepted)
            state.proposed_by = -1
        controller.costs.add_step(MIXED if mixed else len(rows), num_tokens, seconds)
        return prompt_tokens

    # ------------------------------------------------------------------ drafting

    def _decide(self, rows: Sequence[DraftRow], states: Sequence[RowState], prompt_tokens: int) -> None:
        sampling = []
        for row, state in zip(rows, states, strict=True):
            if row.sampled:
                state.limit = row.max_drafts
                state.lag = max(0, len(row.tokens) - row.num_draft_valid - _USUAL_LAG)
                sampling.append(state)
        self._controller.decide(sampling, prompt_tokens)

    def _draft(
        self, rows: Sequence[DraftRow], states: Sequence[RowState], target: TargetOutput, changed: bool
    ) -> list[Proposal]:
        counts = [min(s.num_drafts, row.max_drafts) for row, s in zip(rows, states, strict=True)]
        results: list[Proposal] = []
        for index, drafter in enumerate(self._drafters):
            mine = [count if s.drafter == index else 0 for count, s in zip(counts, states, strict=True)]
            if index > 0 and not changed and not any(mine):
                continue  # it lags nothing and owns nothing; it forgets finished requests when the batch changes
            own_rows = [
                row if row.max_drafts == count else row._replace(max_drafts=count)
                for row, count in zip(rows, mine, strict=True)
            ]
            began = self._clock()
            found = drafter.propose(own_rows, target)
            self._measure(index, own_rows, self._clock() - began)
            for state, count, proposal in zip(states, mine, found, strict=True):
                if count:
                    self._controller.proposed(state, index, count, len(proposal.drafts.token_ids))
            results = found if index == 0 else _merged(results, found, mine)
        return results

    def _measure(self, drafter: int, rows: Sequence[DraftRow], seconds: float) -> None:
        served = passes = lag = 0
        mixed = False
        for row in rows:
            if row.max_drafts:
                served += 1
                passes = max(passes, row.max_drafts)
                lag += max(0, len(row.tokens) - row.num_draft_valid - _USUAL_LAG - row.num_accepted)
            mixed = mixed or not row.sampled
        if drafter > 0 or lag <= 4 * served:
            lag = 0
        self._controller.costs.add_draft(drafter, DraftSize(served, passes, lag, mixed and drafter == 0), seconds)


def _merged(first: list[Proposal], other: list[Proposal], served: Sequence[int]) -> list[Proposal]:
    """`first`, with the drafts of `other` for the rows that it served. What is computed is `first`'s to say: it drafted
    nothing for them."""
    return [
        Proposal(b.drafts, a.num_draft_computed) if count else a
        for a, b, count in zip(first, other, served, strict=True)
    ]
