"""Slots for the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...kernels.quantized_linear import QuantizedWeight

Weight: TypeAlias = Tensor | QuantizedWeight
"""Weight as a checkpoint holds it."""


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """One tensor that a layer needs. A layer is ready once each of its slots was loaded, exactly once."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    """Take the tensor, in any dtype and on any device, without keeping a reference to it."""
    scale: float = 0.0
    """Standard deviation of random weights (`load_format="dummy"`); 0: all ones."""
    load_quantized: Callable[[QuantizedWeight], None] | None = None
    """Take a quantised weight instead; None: it is dequantised for `load`."""
    is_elsewhere: bool = False
    """True: another process has the tensor, so that it is not read and not loaded here."""
    remember: Callable[[Callable[[], Weight]], None] | None = None
    """Take the function that reads the tensor again, if this process keeps a part of it."""

    def fill(self, weight: Weight) -> None:
        """Take a weight in either form."""
        if isinstance(weight, Tensor):
            self.load(weight)
        elif self.load_quantized is not None:
            self.load_quantized(weight)
        else:
            self.load(weight.dequantized())

    def transposed(self) -> WeightSlot:
        """Slot for the same matrix if the checkpoint stores it transposed, unless it is quantised."""
        load, remember = self.load, self.remember

        def turned(weight: Weight) -> Weight:
            return weight.t().contiguous() if isinstance(weight, Tensor) else weight

        return WeightSlot(
            self.shape[::-1],
            lambda tensor: load(tensor.t().contiguous()),
            self.scale,
            self.load_quantized,
            remember=None if remember is None else lambda read: remember(lambda: turned(read())),
        )


def whole_weight(
    read: Callable[[], Weight], quantize: Callable[[Tensor], QuantizedWeight] | None, dtype: torch.dtype
) -> Tensor:
    """Read a weight from the checkpoint again, on the CPU, as it is served: maybe rounded by `quantize`."""
    weight = read()
    if isinstance(weight, Tensor) and quantize is not None:
        weight = quantize(weight)
    return (weight if isinstance(weight, Tensor) else weight.dequantized()).to("cpu", dtype)


class RenamedSlot(NamedTuple):
    """Slot of a tensor that stands for tensors with other names."""

    slot: WeightSlot
    replaced: tuple[str, ...]
    """Names in `weight_slots` of the tensors that it stands for."""
