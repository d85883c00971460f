"""Causal depthwise convolution of a layer; `kernels.short_convolution` has its equation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.short_convolution import Filters, short_convolution
from ..layers.weights import WeightSlot
from .memory import LayerStates, StatePass


class Convolution:
    """Weights of a convolution with one filter for each channel; sums are made in float32."""

    def __init__(
        self, name: str, channels: int, kernel: int, *, bias: bool, dtype: torch.dtype, device: torch.device, **_: Any
    ) -> None:
        """`name`: of the module in the checkpoint."""
        self._name, self._shape = name, (channels, 1, kernel)
        self._has_bias = bias
        self._dtype, self._device = dtype, device
        self._taps: Tensor | None = None
        self._bias: Tensor | None = None

    def forward(self, x: Tensor, states: StatePass, memory: LayerStates, *, silu: bool = False) -> Tensor:
        """Compute y [T, C], and SiLU of it with `silu`, from x [T, C], and write the states of `memory`."""
        assert self._taps is not None, "the loader left no slot empty"
        return short_convolution(x, Filters(self._taps, self._bias), states, memory.conv, silu=silu)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = {f"{self._name}.weight": WeightSlot(self._shape, self._load, self._shape[2] ** -0.5)}
        if self._has_bias:
            slots[f"{self._name}.bias"] = WeightSlot(self._shape[:1], self._load_bias, 0.02)
        return slots

    def _load(self, tensor: Tensor) -> None:
        weight = tensor.to(self._device, self._dtype).float().squeeze(1)
        self._taps = weight.t().contiguous()

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor.to(self._device, self._dtype, copy=True).float()
