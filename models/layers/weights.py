"""Where the tensors of a checkpoint go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """One tensor that a layer wants. A layer is ready once each of its slots was loaded, exactly once."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    """Takes the tensor in any dtype and on any device, and keeps no reference to it."""
    scale: float = 0.0
    """Standard deviation of random weights (`load_format="dummy"`); 0: all ones."""
