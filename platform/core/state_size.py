"""Sizes of the memory for recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import InvalidRequestError
from .sizes import format_bytes

if TYPE_CHECKING:
    from .config import ModelFacts

_SHARE_OF_SEQUENCES = 0.5
"""Share of the cache's memory that the states of running sequences take at most by default."""
_SHARE_OF_SNAPSHOTS = 0.125
"""Share of the cache's memory that the prefix cache's states take at most."""
_SNAPSHOTS_PER_SEQUENCE = 4
"""Most states of the prefix cache for each sequence that may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """Slots of recurrent states, each of all layers."""

    ring_size: int
    """Slots of a sequence: one for each token that a step may verify or sample, and two for the lengths before, where
    the next step may start."""
    num_rings: int
    """Sequences that have slots."""
    num_snapshots: int
    """Slots of the prefix cache."""

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self.ring_size * self.num_rings + self.num_snapshots


def ring_size(num_drafts: int) -> int:
    """Slots of a sequence, of whose drafts a step verifies up to `num_drafts`: their states, the state of the token
    before them, and the state that the step starts with, which counts again if nothing could be sampled."""
    return 2 + num_drafts


def most_sequences(default: int, facts: ModelFacts, num_drafts: int, memory: int) -> int:
    """Sequences that run at once if the options do not say how many: `default`, or as many as have memory."""
    if not facts.state_bytes:
        return default
    each = facts.state_bytes * ring_size(num_drafts)
    return max(1, min(default, int(_SHARE_OF_SEQUENCES * memory) // each - 1))


def state_config(facts: ModelFacts, max_num_seqs: int, num_drafts: int, memory: int) -> StateConfig | None:
    """Slots for a model in the cache's `memory`; None: it has no states.

    Raises:
        InvalidRequestError: there is no memory for so many sequences.
    """
    if not facts.state_bytes:
        return None
    size, rings = ring_size(num_drafts), max_num_seqs + 1  # one waits until another is preempted for it
    taken = size * rings * facts.state_bytes
    if taken >= memory:
        raise InvalidRequestError(
            f"the recurrent states of max_num_seqs {max_num_seqs} take {format_bytes(taken)}, and the cache has "
            f"{format_bytes(memory)}; lower max_num_seqs or num_speculative_tokens, or raise kv_cache_memory_bytes",
            param="max_num_seqs",
        )
    fits = int(_SHARE_OF_SNAPSHOTS * memory) // facts.state_bytes
    return StateConfig(ring_size=size, num_rings=rings, num_snapshots=min(_SNAPSHOTS_PER_SEQUENCE * max_num_seqs, fits))
