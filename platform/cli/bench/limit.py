"""How near a mode comes to what its drafts allow: achieved / limit.

    limit = tau / (v + k c + h)

is the speed-up over no speculation that the drafter's acceptance would give if speculation cost nothing but its
passes through the models. All of it is measured in the same run, over steps in which every row of a full batch decodes,
in units of u, the wall time of such a step without speculation:

    tau   tokens that a row gets a step
    v     the target's share of a step that verifies: its batch, forward pass, sampling and verification, over u
    k     passes of the drafter a step: the number of drafts, where each is a pass; otherwise 1
    c     one pass of the drafter over u. Where each draft is a pass: what one draft more costs, (T_k - T_1) / (k - 1),
          for the times T of proposing k drafts and one; the requests run with one draft, too, for that
    h     the host's share of a step without speculation: what is not the target's, over u

So without speculation v + h = 1 and the limit is 1. Not in the limit, and so a loss: host work that speculation adds
(planning, committing), what a drafter does beside its passes (catching up, building its batches), and steps at the end
of a request whose tokens are cut.

`achieved` is the speed-up of decoding: seconds a token after each request's first. Means leave out the slowest
twentieth of the steps, which other users of the machine have made. The ratio is noisy by as much as the machine is, and
with more than one row by the steps in which the batch is not full, so it can come out a little above 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .modes import ONE_DRAFT_A_PASS, Mode
from .observer import StepTimes

_KEPT = 0.95


@dataclass(frozen=True, slots=True)
class Limit:
    """The terms of the formula, and what was achieved."""

    unit_seconds: float
    tau: float
    v: float
    k: float
    c: float
    h: float
    achieved: float

    @property
    def limit(self) -> float:
        """The best speed-up that the drafts allow."""
        return self.tau / (self.v + self.k * self.c + self.h)

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        values = {name: round(value, 6) for name, value in asdict(self).items()}
        return values | {
            "limit": round(self.limit, 4),
            "achieved_over_limit": round(self.achieved / self.limit, 4),
        }


def full_steps(steps: Iterable[StepTimes]) -> list[StepTimes]:
    """The steps in which the most rows, all past their prompts, decode."""
    decoding = [step for step in steps if step.decoding]
    most = max((step.num_rows for step in decoding), default=0)
    return [step for step in decoding if step.num_rows == most]


def trimmed_mean(values: Sequence[float]) -> float:
    """Without the largest twentieth; 0.0 for none."""
    kept = sorted(values)[: max(1, int(len(values) * _KEPT))]
    return sum(kept) / len(kept) if kept else 0.0


def measure_limit(
    mode: Mode,
    achieved: float,
    off: Iterable[StepTimes],
    steps: Iterable[StepTimes],
    single: Iterable[StepTimes],
) -> Limit | None:
    """The limit of a mode with a fixed number of drafts; None where too few steps were seen.

    Args:
        achieved: the speed-up of decoding over off.
        off, steps: of the same requests without speculation, and in this mode.
        single: in this mode with one draft a step; may be empty where a pass makes all drafts.
    """
    plain, full = full_steps(off), full_steps(steps)
    if not plain or not full:
        return None
    unit = trimmed_mean([step.total for step in plain])
    rows = sum(step.num_rows for step in full)
    return Limit(
        unit_seconds=unit,
        tau=1 + sum(step.num_accepted for step in full) / rows,
        v=trimmed_mean([step.target for step in full]) / unit,
        k=_passes(mode, full),
        c=_pass_seconds(mode, full, full_steps(single)) / unit,
        h=trimmed_mean([step.total - step.target for step in plain]) / unit,
        achieved=achieved,
    )


def _passes(mode: Mode, full: Sequence[StepTimes]) -> float:
    if mode.method not in ONE_DRAFT_A_PASS:
        return 1.0
    return sum(step.most_proposed for step in full) / len(full)


def _pass_seconds(mode: Mode, full: Sequence[StepTimes], single: Sequence[StepTimes]) -> float:
    if mode.method not in ONE_DRAFT_A_PASS:
        return trimmed_mean([step.propose for step in full])
    most = max(step.most_proposed for step in full)
    if most == 0:
        return 0.0
    many = trimmed_mean([step.propose for step in full if step.most_proposed == most])
    each = many / most
    first = [step.propose for step in single if step.most_proposed == 1]
    if most == 1 or not first:
        return each
    return min(each, max(0.0, (many - trimmed_mean(first)) / (most - 1)))
