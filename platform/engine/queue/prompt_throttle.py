"""Throttle of prompts: the number of prompt tokens in a step with decodes.

A step with a long prompt takes many times as long as one without, and no sequence gets a token until it ends. So a step
may take at most about `1 + S` times as long as its decodes alone, with

    S = max(1, 8 * sequences with uncomputed prompts / sequences that decode)

A sequence that waits for its first token counts as eight that wait for their next. If one prompt joins many streams,
their time between tokens at most doubles, and most of the prompt is computed while the weights are read, as a decode
must anyway. If many wait and few decode, prompts are computed at full speed. Chunked prefill: Agrawal et al. 2024
(Sarathi-Serve, OSDI 2024), with a measured budget.

Some of the time that prompts add does not depend on their number of tokens: on a GPU decodes are one graph, and a step
with prompts may be launched kernel by kernel. Fewer tokens would not shorten such a step, and there would be more such
steps. So this part counts as time of the decodes. It is the intercept of the line through the times of two steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ...core.batch import StepPlan
from .step_budget import StepBudget

START = 32
"""Prompt tokens of a step with decodes before anything was measured."""
FEWEST = 8
"""Minimum of prompt tokens in a step, so that every prompt finishes; of a step that is compared, a quarter of it."""
UNMEASURED = 16
"""Steps with prompts at an unmeasured number of decodes after which one step runs without prompts, to time it."""
_IMPATIENCE = 8.0
"""Weight of a sequence that waits for its first token, in decoding sequences."""
_SMOOTHING = 0.2
_LEAST_SECONDS = 1e-9
"""Minimum time of a step that counts: the clock's resolution."""
_LARGEST_CHANGE = 1.25
"""Largest change of the number of tokens after one step: a step may have been delayed by another process."""


class _FixedTime:
    """Part of the seconds that prompts add to a step which does not depend on their number of tokens.

    It is the intercept of a line through two successive steps, the second with at most half of the first one's tokens.
    Both see the same load of the machine. The median of a few pairs is used, since a step may have been delayed.
    """

    _PAIRS = 5
    _EVERY = 16
    """Steps after which a pair is forced if none occurred: its small step costs a few per cent of the prompts'
    speed. A slow start, or a burst of other load, is forgotten after three pairs."""
    _DOUBT = 0.15
    """Share of a step's added time that is subtracted from the fixed part, so that noise alone gives none."""

    def __init__(self) -> None:
        self._fixed: deque[float] = deque(maxlen=self._PAIRS)
        self._last: tuple[int, float] | None = None
        self._num_steps = 0

    @property
    def wants_pair(self) -> bool:
        """True if the next step should have a quarter of the tokens."""
        is_known = len(self._fixed) == self._PAIRS
        return self._last is not None and self._num_steps >= (self._EVERY if is_known else 2)

    @property
    def seconds(self) -> float:
        """Median of the last pairs; 0 before there are some."""
        return median(self._fixed) if len(self._fixed) > self._PAIRS // 2 else 0.0

    def record(self, tokens: int, added: float) -> bool:
        """Record the seconds that prompt tokens added to a step. True if it forms a pair with the step before."""
        if self._last is None or 2 * tokens > self._last[0]:
            # A forced small step that forms no pair, since the one before was small too, is not forced again at once.
            self._num_steps = 1 if self.wants_pair else self._num_steps + 1
            self._last = tokens, added
            return False
        more, longer = self._last
        each = max(0.0, (longer - added) / (more - tokens))
        self._fixed.append(max(0.0, (1 - self._DOUBT) * longer - each * more))
        self._last, self._num_steps = None, 0
        return True


class PromptThrottle:
    """Throttle driven by step times. Sizes are numbers of tokens, times are seconds."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of steps without prompts, by the bit length of their tokens
        self._unmeasured: dict[int, int] = {}  # steps with some, of those lengths that are not known
        self._fixed = _FixedTime()
        self._tokens = float(START)  # that take as long as the decodes of their step

    def apply(self, step: StepBudget, num_prompts: int) -> None:
        """Bound the prompt tokens of a step that has only decodes so far; `num_prompts` runnable sequences have
        uncomputed prompts."""
        num_tokens = sum(row.num_tokens for row in step.rows.values())
        limit = self.limit(num_tokens, len(step.rows), num_prompts)
        if self._unmeasured.get(num_tokens.bit_length(), 0) >= UNMEASURED:
            del self._unmeasured[num_tokens.bit_length()]
            limit = 0
        if limit is not None:
            step.for_prompts = min(step.num_left, limit)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the time of a step that was computed."""
        decodes = sum(row.num_tokens for row in plan.rows if row.num_tokens == 1 + row.num_drafts)
        self.record(decodes, plan.num_tokens - decodes, seconds)

    def limit(self, num_decode_tokens: int, num_decoding: int, num_prompts: int) -> int | None:
        """Most prompt tokens of a step that computes `num_decode_tokens` of `num_decoding` sequences, while
        `num_prompts` sequences wait or are within their prompt; None: any number. Now and then it is a quarter, for
        comparison."""
        if num_decoding == 0 or num_decode_tokens == 0:
            return None
        share = max(1.0, _IMPATIENCE * num_prompts / num_decoding)
        if self._fixed.wants_pair:
            return max(FEWEST // 4, int(self._tokens * share / 4))
        return max(FEWEST, int(self._tokens * share))

    def record(self, num_decode_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Record the time of a step by its numbers of tokens."""
        if num_decode_tokens == 0 or seconds < _LEAST_SECONDS:
            return
        kind = num_decode_tokens.bit_length()
        if num_prompt_tokens == 0:
            known = self._alone.get(kind)
            # A low quantile of the times: occasional delays are not the decodes' cost.
            weight = _SMOOTHING if known is None or seconds < known else _SMOOTHING / 4
            self._alone[kind] = seconds if known is None else known + weight * (seconds - known)
            return
        if kind not in self._alone:
            self._unmeasured[kind] = self._unmeasured.get(kind, 0) + 1
        alone = self._seconds_alone(kind)
        if alone is None:
            return
        if num_prompt_tokens < FEWEST // 2 and not self._fixed.wants_pair:
            return  # the time of a prompt's last few tokens does not predict that of more
        added = max(seconds - alone, 0.05 * alone)
        if self._fixed.record(num_prompt_tokens, added):
            return  # the time of so few tokens does not predict that of more
        fixed = min(self._fixed.seconds, added)
        least = alone + fixed
        wanted = least * num_prompt_tokens / max(added - fixed, 0.05 * least)
        change = min(max(wanted / self._tokens, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)
        self._tokens = max(float(FEWEST), change * self._tokens)

    def _seconds_alone(self, kind: int) -> float | None:
        if kind in self._alone:
            return self._alone[kind]
        if not self._alone:
            return None
        return self._alone[min(self._alone, key=lambda other: abs(other - kind))]
