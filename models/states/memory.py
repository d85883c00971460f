"""Memory of recurrent states, and the plan of a pass over it.

K kernel of the convolution, C channels, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...kernels.memory import lazy_zeros, release_pages
from ...kernels.state_plan import StatePlan

if TYPE_CHECKING:
    from ..batch import SequenceRows


class StateSpec(NamedTuple):
    """State of one layer for a sequence."""

    conv: tuple[int, int]
    """[K - 1, C] last inputs of the convolution, in the model's dtype."""
    recurrent: tuple[int, int, int] | None
    """Shape of the recurrent state in float32; None: there is none."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a state."""
        return math.prod(self.conv) * dtype.itemsize + (4 * math.prod(self.recurrent) if self.recurrent else 0)


class LayerStates(NamedTuple):
    """Slots of one layer. Slot 0 is the state of length 0, and stays zero."""

    conv: Tensor
    """[S, K - 1, C]"""
    recurrent: Tensor | None
    """[S, heads, keys, values] float32"""


def allocate_states(
    specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[LayerStates]:
    """Memory of `num_slots` states for each layer, and of slot 0."""
    slots = 1 + num_slots
    return [
        LayerStates(
            lazy_zeros((slots, *spec.conv), dtype, device),
            None if spec.recurrent is None else lazy_zeros((slots, *spec.recurrent), torch.float32, device),
        )
        for spec in specs
    ]


def release_states(memory: Sequence[LayerStates]) -> None:
    """Return the memory of states to the system; they are zero then."""
    for part in (part for layer in memory for part in layer if part is not None):
        release_pages(part)


class StatePass(StatePlan):
    """Plan of a pass over the memory of all layers."""

    def __init__(self, rows: SequenceRows, memory: Sequence[LayerStates]) -> None:
        """Plan `rows`, whose starts the host knows, over the layers' `memory`."""
        self.memory = memory
        parts = list(zip(rows.states, rows.starts, rows.query_lens, strict=True))
        super().__init__(
            rows.query_lens,
            [states.source(start) for states, start, _ in parts],
            [
                [(length - start, slot) for length, slot in states.writes(start, start + count)]
                for states, start, count in parts
            ],
            history=memory[0].conv.shape[1],
            device=memory[0].conv.device,
        )
