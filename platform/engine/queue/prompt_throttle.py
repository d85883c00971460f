"""Throttle of prompts: the number of prompt tokens in a step together with sequences that decode.

A step with a long prompt takes many times as long as one without, and for all that time nobody gets a token. So a step
may take at most about `1 + S` times what its decodes take alone, with

    S = max(1, 8 * sequences that want their prompts computed / sequences that decode)

One that waits for its first token counts as eight that wait for their next. If one prompt comes to many streams, their
time between tokens stays within twice the usual, and most of the prompt is computed in the shadow of the weights, which
a decode reads anyway. If many wait for few, it is computed as fast as it goes. Chunked prefill: Agrawal et al. 2024
(Sarathi-Serve, OSDI 2024), whose budget is found here by measuring.

Some of the time that prompts add does not depend on their number of tokens: on a GPU decodes are one graph, and a step
with prompts may be launched kernel by kernel. Fewer tokens would not shorten such a step, and there would be more such
steps. So this part counts as time of the decodes. It is where the line through the times of two steps begins.
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
"""Number of decoding sequences for which one counts that waits for its first token."""
_SMOOTHING = 0.2
_LEAST_SECONDS = 1e-9
"""Time of a step from which on it counts: a clock shows no less."""
_LARGEST_CHANGE = 1.25
"""Largest change of the number of tokens after one step: a step that another process held up says little."""


class _FixedTime:
    """Part of the seconds that prompts add to a step which does not depend on their number of tokens.

    A line through two successive steps, the second with at most half of the first one's tokens, begins there. Both see
    the same load of the machine. The median of a few pairs counts: one of the steps may have been held up.
    """

    _PAIRS = 5
    _EVERY = 16
    """Steps after which a pair is made if none came by itself: its small step costs a few per cent of the prompts'
    speed. A slow start, or a burst of other load, is forgotten after three pairs."""
    _DOUBT = 0.15
    """Share of a step's added time, against the fixed part: noise alone must not show one."""

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
        """Record a step whose prompt tokens added so many seconds. True if it makes a pair with the one before."""
        if self._last is None or 2 * tokens > self._last[0]:
            # A small step that was wanted, and makes no pair with one that was small too, is not wanted again at once.
            self._num_steps = 1 if self.wants_pair else self._num_steps + 1
            self._last = tokens, added
            return False
        more, longer = self._last
        each = max(0.0, (longer - added) / (more - tokens))
        self._fixed.append(max(0.0, (1 - self._DOUBT) * longer - each * more))
        self._last, self._num_steps = None, 0
        return True


class PromptThrottle:
    """Throttle that is set by the times of steps. Sizes are numbers of tokens, times seconds."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of steps without prompts, by the bit length of their tokens
        self._unmeasured: dict[int, int] = {}  # steps with some, of those lengths that are not known
        self._fixed = _FixedTime()
        self._tokens = float(START)  # that take as long as the decodes of their step

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

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the time of a step that was computed."""
        decodes = sum(row.num_tokens for row in plan.rows if row.num_tokens == 1 + row.num_drafts)
        self.record(decodes, plan.num_tokens - decodes, seconds)

    def limit(self, num_decode_tokens: int, num_decoding: int, num_prompts: int) -> int | None:
        """Most prompt tokens of a step that computes `num_decode_tokens` of `num_decoding` sequences, while
        `num_prompts` sequences wait or are within their prompt; None: any number. Now and then it is a quarter, to
        compare with."""
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
            # The lower part of the times: what holds a step up now and then is not the decodes' price.
            weight = _SMOOTHING if known is None or seconds < known else _SMOOTHING / 4
            self._alone[kind] = seconds if known is None else known + weight * (seconds - known)
            return
        if kind not in self._alone:
            self._unmeasured[kind] = self._unmeasured.get(kind, 0) + 1
        alone = self._seconds_alone(kind)
        if alone is None:
            return
        if num_prompt_tokens < FEWEST // 2 and not self._fixed.wants_pair:
            return  # what a prompt's last tokens take says little of what more would
        added = max(seconds - alone, 0.05 * alone)
        if self._fixed.record(num_prompt_tokens, added):
            return  # so few tokens say little of what more would take
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
