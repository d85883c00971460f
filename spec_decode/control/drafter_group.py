"""DrafterGroup: several drafters behind the contract of one. Each row's `drafter` is the index of its drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...platform.core.request import NO_DRAFTS, Drafts, Request
from ..drafters.base import Drafter, DrafterNeeds, DraftRow, Proposal, TargetOutput

if TYPE_CHECKING:
    from ...models.batch import AdapterPreparer, LayerKV
    from ..learning.learner import Learner


LooksUp = Callable[[Request], bool]
"""`SpeculationPolicy.looks_up`."""
PrefersMatch = Callable[[Request, Drafts, int], bool]
"""`SpeculationPolicy.prefers_match`; its second argument may be no drafts."""


class DrafterGroup(Drafter):
    """The first drafter may own layers and draft on the device; the others are fallbacks on the host. Long matches of
    the second one are verified instead of the first one's drafts."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        prefers_match: PrefersMatch | None = None,
        looks_up: LooksUp = lambda request: True,
    ) -> None:
        """Group drafters.

        Args:
            prefers_match: Decides for which rows of the first drafter the second one's drafts are verified instead;
                None: for no row.
            looks_up: Decides for which of these rows the second one is asked.
        """
        self._drafters = drafters
        self._prefers_match = prefers_match
        self._looks_up = looks_up
        self._first = drafters[0]
        self._lags = self._first.needs.lags

    @property
    def needs(self) -> DrafterNeeds:
        """Needs of the first drafter; a fallback has none."""
        return self._first.needs

    @property
    def weights(self) -> Sequence[Any]:
        """Weights of the first drafter; a fallback has none."""
        return self._first.weights

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """See `Drafter`."""
        self._first.bind(kv, prepare_adapters)

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts of each row by its drafter. The first drafter sees all rows, since it reports its computed tokens of
        each; a fallback sees only its own rows. On the device the first drafter drafts for all."""
        if target.on_device is not None:
            return self._first.propose(rows, target)
        matched = self._matches(rows, target)
        rows = [row._replace(max_drafts=0) if at in matched else row for at, row in enumerate(rows)]
        results: list[Proposal] = []
        for index, drafter in enumerate(self._drafters):
            asking = [at for at, row in enumerate(rows) if row.max_drafts and row.drafter == index]
            if not asking:
                drafter.watch(rows, target)
                if index == 0:
                    results = [Proposal(NO_DRAFTS, self._num_draft_computed(row)) for row in rows]
            elif index == 0:
                most = self._first.needs.max_drafts
                own = [row._replace(max_drafts=0 if row.drafter else min(row.max_drafts, most)) for row in rows]
                results = drafter.propose(own, target)
            else:
                found = drafter.propose([rows[at] for at in asking], target)
                for at, proposal in zip(asking, found, strict=True):
                    if proposal.drafts.token_ids:
                        drafts = proposal.drafts._replace(drafter=index)
                        results[at] = Proposal(drafts, results[at].num_draft_computed)
        for at, drafts in matched.items():
            results[at] = Proposal(drafts, results[at].num_draft_computed)
        return results

    def _matches(self, rows: Sequence[DraftRow], target: TargetOutput) -> dict[int, Drafts]:
        """Drafts of the second drafter that are verified instead of the first one's, by row."""
        if self._prefers_match is None:
            return {}
        asking = [
            at
            for at, row in enumerate(rows)
            if row.max_drafts and row.sampled and row.drafter == 0 and self._looks_up(row.request)
        ]
        if not asking:
            return {}
        found = self._drafters[1].propose([rows[at] for at in asking], target)
        return {
            at: proposal.drafts._replace(drafter=1)
            for at, proposal in zip(asking, found, strict=True)
            if self._prefers_match(rows[at].request, proposal.drafts, rows[at].max_drafts)
        }

    def _num_draft_computed(self, row: DraftRow) -> int:
        return row.num_draft_valid if self._lags else len(row.tokens)

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """See `Drafter`."""
        for drafter in self._drafters if target.on_device is None else self._drafters[:1]:
            drafter.watch(rows, target)

    def learn(self, learner: Learner) -> None:
        """See `Drafter`."""
        self._first.learn(learner)

    def flush(self) -> None:
        """See `Drafter`."""
        self._first.flush()

    def forget_adapter(self, digest: bytes) -> None:
        """See `Drafter`."""
        for drafter in self._drafters:
            drafter.forget_adapter(digest)
