"""What requests have been like lately, as far as it says what drafting is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .step_costs import row_class

FEW = 4
"""Rows up to which a batch that drains passes all numbers in a moment. By their class: five are like four."""
RowSteps = Iterable[tuple[int, int]]
"""Numbers of rows, and steps that had so many."""
_STEPS = 128
"""Of few rows, that are counted before older ones are forgotten: some batches that drain, but no more, since that may
have ended."""

_MEMORY, _FEW_OUTPUTS = 4000.0, 200.0
"""Tokens of answers over which it is averaged, and those that it takes to say anything."""


class Workload:
    """Sums that forget exponentially."""

    __slots__ = ("_answers", "_outputs", "_prompts", "_steps")

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}  # by class of rows
        self._prompts = self._outputs = 0.0  # tokens
        self._answers = 0.0

    def computed(self, prompt_tokens: int, output_tokens: int, num_answers: int) -> None:
        """A step computed that many tokens of prompts, and brought that many of answers, so many of them the first."""
        keep = math.exp(-output_tokens / _MEMORY)
        self._prompts = self._prompts * keep + prompt_tokens
        self._outputs = self._outputs * keep + output_tokens
        self._answers = self._answers * keep + num_answers

    def had(self, row_steps: RowSteps) -> None:
        """Steps without prompts; those of more than few rows do not count."""
        for num_rows, steps in row_steps:
            rows = row_class(num_rows)
            if steps and 0 < rows <= FEW:
                self._steps[rows] = self._steps.get(rows, 0.0) + steps
        if sum(self._steps.values()) > _STEPS:
            self._steps = {rows: steps / 2 for rows, steps in self._steps.items() if steps >= 1.0}

    @property
    def steps_by_rows(self) -> Mapping[int, float]:
        """Of few rows, by their class: how often there were so many lately."""
        return self._steps

    @property
    def answer_length(self) -> float:
        """Tokens of an answer; infinite where that is not known. As if an answer ended by chance, so many are always
        still to come."""
        return self._outputs / self._answers if self._outputs >= _FEW_OUTPUTS and self._answers else math.inf

    @property
    def prompts_per_token(self) -> float:
        """Prompt tokens for each token of an answer."""
        return self._prompts / self._outputs if self._outputs >= _FEW_OUTPUTS else 0.0
