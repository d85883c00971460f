"""Times of a step's parts, from a drafter that wraps the drafter and keeps what passes through it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ....spec_decode.drafters.base import (
    AdapterPreparer,
    DraftRow,
    Proposal,
    Proposer,
    ProposerNeeds,
    Resting,
    TargetOutput,
)

if TYPE_CHECKING:
    from ....models.batch import LayerKV
    from ...core.batch import RowPlan


class StepTimes(NamedTuple):
    """One step of the engine; times in seconds."""

    total: float
    """All of `EngineCore.step`."""
    target: float
    """The target: building the batch, forward pass, sampling and verification."""
    propose: float
    """The drafter."""
    num_rows: int
    decoding: bool
    """All rows are past their prompts."""
    num_verified: int
    """Drafts verified, over all rows."""
    num_accepted: int
    most_proposed: int
    """Drafts made for the row that got the most: the number of passes, where each makes one."""
    proposed: tuple[int, ...]
    """Drafts made for each row that asked for some."""


class StepObserver:
    """A drafter that hands everything on to another one and takes the time. Part of measurements only.

    Steps wait for it: it is no LateDrafter, for where steps overlap the host cannot tell their parts.
    """

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self._resting = inner if isinstance(inner, Resting) else None
        self._steps: list[StepTimes] = []
        self._open = False

    @property
    def needs(self) -> ProposerNeeds:
        """The wrapped drafter's."""
        return self._inner.needs

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Handed on."""
        self._inner.bind(kv, prepare_adapters)

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Handed on, and noted; `end_step` completes the note."""
        started = time.perf_counter()
        proposals = self._inner.propose(rows, target)
        seconds = time.perf_counter() - started
        counts = [len(proposal.drafts.token_ids) for proposal in proposals]
        asked = tuple(n for n, row in zip(counts, rows, strict=True) if row.sampled and row.max_drafts > 0)
        self._open = True
        self._steps.append(
            StepTimes(
                total=target.seconds + seconds,
                target=target.seconds,
                propose=seconds,
                num_rows=len(rows),
                decoding=all(row.start >= row.request.num_prompt_tokens for row in rows),
                num_verified=sum(row.num_drafts for row in rows),
                num_accepted=sum(row.num_accepted for row in rows),
                most_proposed=max(counts, default=0),
                proposed=asked,
            )
        )
        return proposals

    @property
    def rest(self) -> int:
        """Handed on; none where the wrapped drafter is always asked."""
        return self._resting.rest if self._resting is not None else 0

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Handed on, and noted."""
        started = time.perf_counter()
        if self._resting is not None:
            self._resting.rested(rows, target)
        seconds = time.perf_counter() - started
        decoding = all(row.start >= row.request.num_prompt_tokens for row in rows)
        self._open = True
        self._steps.append(
            StepTimes(target.seconds + seconds, target.seconds, seconds, len(rows), decoding, 0, 0, 0, ())
        )

    def forget_adapter(self, digest: bytes) -> None:
        """Handed on."""
        self._inner.forget_adapter(digest)

    def end_step(self, seconds: float) -> None:
        """The engine's step took so long in all. One that had nothing to compute was not noted, and is not now."""
        if self._open:
            self._steps[-1] = self._steps[-1]._replace(total=seconds)
        self._open = False

    def take(self) -> list[StepTimes]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps
