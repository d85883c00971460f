"""One step: the scheduler's plan and the runner's result.

Scheduler.schedule() -> StepPlan -> ModelRunner.launch, collect -> StepResult -> Scheduler.commit, ModelRunner.draft

A step may be planned while the one before it runs, before its tokens and accepted drafts are known. Such a row is
planned as if all drafts were right, and the device corrects its positions (`RowPlan.awaits_token`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import ErrorInfo
from .messages import TokenLogprobs
from .request import Request


class RowStates(NamedTuple):
    """Slots of recurrent states that a row reads and writes. A state is that after a number of leading tokens, its
    length; slot 0 holds the state before the first token, and is never written."""

    ring: Sequence[int]
    """The sequence's own slots: the state of length n is in slot n modulo their number."""
    num_kept: int
    """Most states at the end of the row that are written to them. The next row starts with one of these, or with the
    one that this row starts with."""
    origin: tuple[int, int] = (0, 0)
    """(length, slot) of the state that the sequence began with."""
    snapshots: Sequence[tuple[int, int]] = ()
    """(length, slot) of states within the row to write to other slots too."""

    def source(self, start: int) -> int:
        """Slot of the state of length `start`."""
        return self.origin[1] if start == self.origin[0] else self.ring[start % len(self.ring)]

    def writes(self, start: int, end: int) -> list[tuple[int, int]]:
        """(length, slot) of each state to write after a row of the tokens [start, end), in ascending order."""
        kept = range(max(start + 1, end + 1 - self.num_kept), end + 1)
        return sorted([*((n, self.ring[n % len(self.ring)]) for n in kept), *self.snapshots])


@dataclass(slots=True)
class RowPlan:
    """One sequence's share of a step: compute the tokens at positions [start, start + num_tokens)."""

    request: Request
    start: int
    """First position: the request's `num_computed_tokens` when planned. A row that awaits a token has the largest
    possible start until the step before is committed."""
    num_tokens: int
    """Tokens to compute; the last `num_drafts` of them are drafts."""
    num_drafts: int
    samples: bool
    """True when the row reaches the end of its tokens, so that a token is sampled: it has logits for its last
    1 + num_drafts positions. Never true for pooled prompts."""
    max_new_drafts: int
    """Drafts to propose after this step: there are KV blocks for them."""
    drafter: int = 0
    """Index of the drafter that proposes them."""
    is_forced: bool = False
    """True if a grammar allows no tokens but its drafts."""
    states: RowStates | None = None
    """Recurrent states; None: the model has none."""
    awaits_token: bool = False
    """True when its first token is sampled by the sequence's row in the step in flight, which also makes its drafts."""

    @property
    def end(self) -> int:
        """One past the last position computed, drafts included."""
        return self.start + self.num_tokens


class Move(NamedTuple):
    """One KV block's copy between the device and the host's memory."""

    block: int
    """KV block of the device."""
    slot: int
    """Slot of the host."""
    to_host: bool


@dataclass(slots=True)
class StepPlan:
    """One step's work. Rows are in the order in which they were scheduled."""

    rows: list[RowPlan] = field(default_factory=list)
    can_overlap_next: bool = False
    """True when the next step may be planned before the host knows the results of this one. Then the device makes the
    drafts for that step, if there are any, without the host."""
    moves: Sequence[Move] = ()
    """Copies to make, in this order, before anything is computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the target in this step."""
        return sum(row.num_tokens for row in self.rows)


class RowResult(NamedTuple):
    """Results of a step for one row."""

    token_ids: list[int]
    """The accepted drafts and the next token; empty when the row did not reach its end."""
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None
    """Aligned with `token_ids`, when requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities at the prompt positions start+1 .. of this chunk, when requested."""
    pooled: Any = None
    """[H] float32 tensor on the CPU: this chunk's part of the prompt's pooled hidden states, when requested."""
    error: ErrorInfo | None = None
    """Error when this sequence cannot continue; then nothing else is set."""
    is_deferred: bool = False
    """True when the row reached its end but nothing could be sampled yet; its last token is computed again."""


class StepResult(NamedTuple):
    """Results of a step."""

    rows: list[RowResult]
    """Aligned with the plan's."""
    seconds: float = 0.0
    """Duration of the target's forward pass, sampling and verification; 0 if not measured."""
    gap: float | None = None
    """Seconds between the target's work of the step before and this one's: drafting, and host time that is not
    overlapped."""
