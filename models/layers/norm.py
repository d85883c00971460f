"""RMS normalisation, and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.rms_norm import NormWeight, add_rms_norm, prepare, rms_norm, rms_norm_invariant
from .weights import WeightSlot

if TYPE_CHECKING:
    from ..parallel import NormPart


class RMSNorm:
    """RMS norm over the last dimension. Several weights of that size make one layer: see `repeats`."""

    def __init__(
        self,
        names: Sequence[str],
        size: int,
        eps: float,
        *,
        repeats: Sequence[int] | None = None,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """Create a norm. With one name, x is [..., size]. With `repeats`, x is [..., sum(repeats), size]: repeats[i]
        heads use weight i. `offset` is added to the stored weights."""
        self._names = list(names)
        self._size = size
        self._eps = eps
        self._repeats = repeats
        self._offset = offset
        self._dtype = dtype
        self._device = device
        self._norm = rms_norm_invariant if batch_invariant else rms_norm
        self.factor = 1.0
        """Factor of the stored weights, set before they are loaded."""
        self.part: NormPart | None = None
        """Share of this process in what `__call__` normalises, set before it is loaded; None: all is its own."""
        self._loaded: dict[str, Tensor] = {}
        self._weight: NormWeight | None = None

    @classmethod
    def unscaled(cls, shape: Sequence[int], eps: float, **common: Any) -> RMSNorm:
        """Norm whose weights [size] or [heads, size] are all 1, and not in the checkpoint. `common`: dtype, device and
        batch_invariant."""
        norm = cls([], shape[-1], eps, **common)
        norm._weight = prepare(torch.ones(shape, device=common["device"]), eps)
        return norm

    @property
    def weight(self) -> NormWeight:
        """Prepared weight, for kernels that normalise on the way."""
        assert self._weight is not None, "the loader left no slot empty"
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x, a new tensor of x's shape and dtype."""
        if self.part is not None:
            return self.part.own(self._norm(self.part.whole(x), self.weight))
        return self._norm(x, self._weight)  # type: ignore[arg-type]  # the loader left no slot empty

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of the sum, and the sum, of x and residual [T, H]."""
        assert self._weight is not None, "the loader left no slot empty"
        return add_rms_norm(x, residual, self._weight)

    def scaled(self, factors: Tensor) -> RMSNorm:
        """Norm whose results are those of this one times `factors`, one for each head of `repeats`."""
        other = copy(self)
        other._weight = self.weight._replace(scale=(self.weight.scale * factors.unsqueeze(1)).contiguous())
        return other

    def of_heads(self, first: int) -> RMSNorm:
        """Norm of the heads of `repeats` from `first` on."""
        other = copy(self)
        scale = self.weight.scale[first:]
        other._weight = self.weight._replace(scale=scale, repeats=len(scale))
        return other

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        return {name: self._slot(name) for name in self._names}

    def _slot(self, name: str) -> WeightSlot:
        def load(tensor: Tensor) -> None:
            # Rounded to the model's dtype first, as in a model that holds its weights in it.
            self._loaded[name] = tensor.to(self._device, self._dtype, copy=True)
            if len(self._loaded) == len(self._names):
                weights = [self._loaded[name] for name in self._names]
                if self._repeats is None:
                    merged = weights[0]
                else:
                    merged = torch.cat([w.expand(n, -1) for w, n in zip(weights, self._repeats, strict=True)])
                self._weight = prepare(merged.float() * self.factor + self._offset, self._eps)
                self._loaded = {}

        return WeightSlot((self._size if self.part is None else self.part.size,), load)


class LayerNorm:
    """LayerNorm (Ba et al. 2016) over the last dimension, mostly with a bias. On a CPU torch computes each row
    by itself, so a row's result does not depend, bit for bit, on other rows."""

    def __init__(
        self, name: str, size: int, eps: float, *, bias: bool = True, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self._has_bias = bias
        self._eps = eps
        self._dtype = dtype
        self._device = device
        self._shape = (size,)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x [..., size], a new tensor of x's shape and dtype."""
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        slots = {f"{self._name}.weight": WeightSlot(self._shape, self._load_weight)}
        if self._has_bias:
            slots[f"{self._name}.bias"] = WeightSlot(self._shape, self._load_bias, 0.02)
        return slots

    def _load_weight(self, tensor: Tensor) -> None:
        self._weight = tensor.to(self._device, self._dtype, copy=True)

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor.to(self._device, self._dtype, copy=True)
