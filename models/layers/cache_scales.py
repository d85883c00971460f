"""Scales of an fp8 KV cache. It holds k / s_k and v / s_v, so that larger keys and values fit within its 448.

    (s_k q) · (k / s_k) = q · k           s_v Σ w (v / s_v) = Σ w v

Queries, keys and values are multiplied before attention and its result after it, so every backend serves them.

T tokens, H heads, Hk heads of keys and values, D elements of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...platform.core.errors import InvalidRequestError
from .weights import WeightSlot

if TYPE_CHECKING:
    from .norm import RMSNorm

_STORED = re.compile(r"(.+?)(?:\.(?:k|v|qkv)_proj)?\.(k|v|kv)_scale")
_STORED_AS_OUTPUTS = re.compile(r"(.+)\.([kv])_proj\.output_scale")


class CacheScales:
    """Scales s_k and s_v of one layer."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        """Make scales of 1."""
        self._heads = num_heads, num_kv_heads
        self._head_dim = head_dim
        self._device = device
        self._key = self._value = 1.0
        self._factors: Tensor | None = None
        self._norm: RMSNorm | None = None

    @property
    def are_used(self) -> bool:
        """False when both scales are 1."""
        return (self._key, self._value) != (1.0, 1.0)

    def load(self, name: str, kind: str, tensor: Tensor) -> None:
        """Take the stored tensor `name` of one number, the scale of keys ("k"), values ("v") or both ("kv")."""
        scale = float(tensor)
        if not (math.isfinite(scale) and scale > 0):
            raise InvalidRequestError(f"the tensor {name} must be above 0 and finite; got {scale}", param="model")
        self._key, self._value = scale if "k" in kind else self._key, scale if "v" in kind else self._value

    def enter(self, qkv: Tensor, norm: RMSNorm | None) -> RMSNorm | None:
        """Scale qkv [T, (H + 2 Hk) · D] in place; if there is a `norm` of queries and keys, return one that scales
        these."""
        if self._factors is None:
            num_heads, num_kv_heads = self._heads
            of_queries = torch.tensor([self._key] * num_heads + [1 / self._key] * num_kv_heads)
            if norm is not None:
                self._norm = norm.scaled(of_queries.to(self._device))
                of_queries = torch.ones_like(of_queries)
            factors = torch.cat((of_queries, torch.full((num_kv_heads,), 1 / self._value)))
            self._factors = factors.repeat_interleave(self._head_dim).to(self._device)
        qkv.mul_(self._factors)
        return self._norm

    def weights_changed(self) -> None:
        """Compute what follows from the scales, and from the weights of the norm, again."""
        self._factors = self._norm = None

    def leave(self, attended: Tensor) -> Tensor:
        """Scale attention's result [T, H · D] in place."""
        return attended.mul_(self._value)


def scale_slots(shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, CacheScales]) -> dict[str, WeightSlot]:
    """Slots of the stored tensors, among those of these shapes, that are scales of a layer; `layers` are by the name of
    the layer's attention. Scales of more numbers than one, and of queries, have none."""
    slots: dict[str, WeightSlot] = {}
    for name, shape in shapes.items():
        found = _STORED.fullmatch(name) or _STORED_AS_OUTPUTS.fullmatch(name)
        if found is not None and found[1] in layers and math.prod(shape) == 1:
            slots[name] = WeightSlot(shape, partial(layers[found[1]].load, name, found[2]))
    return slots
