"""Throttle of prompts: the number of prompt tokens that a step takes beside sequences that decode.

A step with a long prompt takes many times as long as one without, and for all that time nobody gets a token. So a step
may take at most about `1 + S` times what its decodes take alone, with

    S = max(1, 8 * sequences that want their prompts computed / sequences that decode)

One that waits for its first token counts as eight that wait for their next. Where one prompt comes to many streams,
their time between tokens stays within twice the usual, and most of the prompt is computed in the shadow of the
weights, which a decode reads anyway. Where many wait for few, it is computed as fast as it goes. Chunked prefill:
Agrawal et al. 2024 (Sarathi-Serve, OSDI 2024), whose budget is found here by measuring.
"""

from __future__ import annotations

from ...core.batch import StepPlan
from .step_budget import StepBudget

START = 32
"""Prompt tokens beside decodes before anything was measured."""
FEWEST = 8
"""Prompt tokens that a step takes in any case: a prompt must end some day."""
UNMEASURED = 16
"""Steps with prompts, beside a number of decodes that was never measured alone, after which one goes without: where
prompts never end, it would never be."""
_IMPATIENCE = 8.0
"""Number of decoding sequences for which one counts that waits for its first token."""
_SMOOTHING = 0.2
_LARGEST_CHANGE = 1.25
"""Largest change of the number of tokens after one step: a step that another process held up says little."""


class PromptThrottle:
    """Learns from the times of steps. Sizes are numbers of tokens, times seconds."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of steps without prompts, by the bit length of their tokens
        self._unmeasured: dict[int, int] = {}  # steps with some, of those lengths that are not known
        self._tokens = float(START)  # that take as long as the decodes beside them

    def apply(self, step: StepBudget, num_prompts: int) -> None:
        """Bound what prompts may have of a step, which has decodes alone so far; `num_prompts` sequences want theirs
        computed and could run."""
        num_tokens = sum(row.num_tokens for row in step.rows.values())
        limit = self.limit(num_tokens, len(step.rows), num_prompts)
        if self._unmeasured.get(num_tokens.bit_length(), 0) >= UNMEASURED:
            del self._unmeasured[num_tokens.bit_length()]
            limit = 0
        if limit is not None:
            step.for_prompts = min(step.num_left, limit)

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that was computed."""
        decodes = sum(row.num_tokens for row in plan.rows if row.num_tokens == 1 + row.num_drafts)
        self.learn(decodes, plan.num_tokens - decodes, seconds)

    def limit(self, num_decode_tokens: int, num_decoding: int, num_prompts: int) -> int | None:
        """Most prompt tokens of a step that computes `num_decode_tokens` of `num_decoding` sequences, while
        `num_prompts` sequences wait or are within their prompt; None: any number."""
        if num_decoding == 0 or num_decode_tokens == 0:
            return None
        share = max(1.0, _IMPATIENCE * num_prompts / num_decoding)
        return max(FEWEST, int(self._tokens * share))

    def learn(self, num_decode_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take in a step by its numbers."""
        if num_decode_tokens == 0 or seconds <= 0.0:
            return
        kind = num_decode_tokens.bit_length()
        if num_prompt_tokens == 0:
            known = self._alone.get(kind)
            # The lower part of the times: what holds a step up now and then is not the decodes' price.
            weight = _SMOOTHING if known is None or seconds < known else _SMOOTHING / 4
            self._alone[kind] = seconds if known is None else known + weight * (seconds - known)
            return
        if kind not in self._alone:
            self._unmeasured[kind] = self._unmeasured.get(kind, 0) + 1
        alone = self._seconds_alone(kind)
        if alone is None or num_prompt_tokens < FEWEST // 2:
            return
        each = max(seconds - alone, 0.05 * alone) / num_prompt_tokens
        wanted = alone / each
        self._tokens *= min(max(wanted / self._tokens, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)

    def _seconds_alone(self, kind: int) -> float | None:
        if kind in self._alone:
            return self._alone[kind]
        if not self._alone:
            return None
        return self._alone[min(self._alone, key=lambda other: abs(other - kind))]
