"""What steps took, by what they did: shows where a way of drafting gains its time and where it loses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .driver import Round
from .observer import StepTimes

_HEADER = (
    f"{'text':12} {'mode':20} {'steps that':34} {'a round':>8} {'ms':>8} {'tokens':>7} {'target':>8} {'drafter':>8}"
)
_NOTES = """\
steps: of the mean round, and what one of them took; of that the target's part (forward pass, sampling, verification)
and the drafter's, with what chooses the drafts. tokens: that a step brought, of all its rows."""


def steps_by_kind(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The steps of a cell in kinds: with prompts or not, verifying drafts or not, and by the drafts made for the row
    that got the most. Means in milliseconds; first the kind that took most in all."""
    kinds: dict[tuple[bool, bool, int], list[StepTimes]] = defaultdict(list)
    for round_ in rounds:
        for step in round_.steps:
            kinds[not step.decoding, step.num_verified > 0, step.most_proposed].append(step)
    found = []
    for (prompts, verifies, drafts), steps in kinds.items():
        mean = 1e3 / len(steps)
        found.append(
            {
                "prompts": prompts,
                "verifies": verifies,
                "drafts": drafts,
                "per_round": round(len(steps) / len(rounds), 3),
                "ms": round(mean * sum(step.total for step in steps), 4),
                "target_ms": round(mean * sum(step.target for step in steps), 4),
                "drafter_ms": round(mean * sum(step.propose for step in steps), 4),
                "tokens": round(sum(step.num_rows + step.num_accepted for step in steps) / len(steps), 3),
            }
        )
    return sorted(found, key=lambda kind: -kind["per_round"] * kind["ms"])


def format_steps(report: dict[str, Any]) -> str:
    """`steps_by_kind` of every row, one table a batch size."""
    lines = []
    for batch_size in dict.fromkeys(row["batch_size"] for row in report["rows"]):
        lines += ["", f"steps at batch size {batch_size}", _HEADER]
        for row in report["rows"]:
            if row["batch_size"] == batch_size:
                lines += [f"{row['task']:12} {row['mode']:20} {_line(kind)}" for kind in row["steps"]]
    return "\n".join([*lines, "", _NOTES])


def _line(kind: dict[str, Any]) -> str:
    drafts = f"draft {kind['drafts']}" if kind["drafts"] else ""
    parts = ["compute prompts" if kind["prompts"] else "decode", "verify" if kind["verifies"] else "", drafts]
    name = ", ".join(part for part in parts if part)
    return (
        f"{name:34} {kind['per_round']:8.2f} {kind['ms']:8.3f} {kind['tokens']:7.2f} {kind['target_ms']:8.3f} "
        f"{kind['drafter_ms']:8.3f}"
    )
