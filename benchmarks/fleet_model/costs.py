"""Times of one replica, in seconds, as tables of what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Table = dict[int, float]


@dataclass(frozen=True)
class Limits:
    """Options of a replica, as `outrider serve` names them."""

    rows: int = 8
    """--max-num-seqs"""
    slots: int = 8
    """--max-loras: adapters that are loaded at once."""
    step_tokens: int = 256
    """--max-num-batched-tokens"""
    rank: int = 16
    """Rank of every adapter."""


@dataclass(frozen=True)
class Costs:
    """Measured times of a replica."""

    one_adapter: Table
    """A step that decodes, by its rows, which have one adapter."""
    own_adapters: Table
    """A step whose rows have an adapter each, by its rows."""
    prompt: Table
    """Time that running requests lose to one with this number of prompt tokens: in its step, and to the API's work."""
    overhead: float
    """Time to first token that is not the engine's: HTTP, and the ways to the engine and back."""
    load: float
    """From the request of an adapter to its load into a slot, in a replica without running requests."""
    load_beside: float
    """Time to read an adapter alongside four running requests, whose steps share the core with it."""
    load_steps: float
    """Time that running requests lose to a load."""
    start: float
    """From the start of a process until it serves."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Costs:
        """Costs from the JSON of a result, whose keys are text."""
        tables = {k: {int(n): s for n, s in v.items()} if isinstance(v, dict) else v for k, v in values.items()}
        return cls(**tables)


class StepTimes:
    """Time of every step that the limits allow, between the measured ones by straight lines."""

    def __init__(self, costs: Costs, limits: Limits) -> None:
        rows = np.arange(1, limits.rows + 1)
        self._one, self._own = _line(costs.one_adapter, rows), _line(costs.own_adapters, rows)
        self._prompt = _line(costs.prompt, np.arange(limits.step_tokens + 1))

    def __call__(self, rows: int, adapters: int, prompt_tokens: int) -> float:
        """Seconds of a step that decodes `rows` of `adapters`, and computes tokens of prompts."""
        index = max(rows, 1) - 1
        one, own = self._one[index], self._own[index]
        share = (min(adapters, rows) - 1) / index if index else 0.0
        return one + (own - one) * share + self._prompt[prompt_tokens]


def _line(table: Table, at: Any) -> list[float]:
    return np.interp(at, sorted(table), [table[n] for n in sorted(table)]).tolist()
