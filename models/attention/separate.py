"""Steps between a layer's projection and attention for the backends in PyTorch: norm, rotation, write, one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import LayerKV
from ...kernels.rope import Rotation, rope_of_part
from . import AttentionSpec

if TYPE_CHECKING:
    from ..layers.norm import RMSNorm


class SeparateSteps(ABC):
    """Base of backends whose `forward_qkv` normalises and rotates, then calls `forward`."""

    looks_up_angles = False

    def __init__(self, spec: AttentionSpec, rope: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Store the model's properties; `rope` is one of `kernels.rope`."""
        self._spec = spec
        options = spec.options
        if options.rotary_dim is not None or options.interleaved:
            rope = rope_of_part(rope, options.rotary_dim or spec.head_dim, interleaved=options.interleaved)
        self._rope = rope

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._spec.device)

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, plan: Any, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Store k and v [T, Hk, D] (which may be mutated) in `kv`, then attend with q [T, H, D]; return [T, H · D]."""

    def forward_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: RMSNorm | None,
        kv: LayerKV,
        plan: Any,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend."""
        heads = qkv.view(qkv.shape[0], -1, self._spec.head_dim)
        num_qk = self._spec.num_heads + self._spec.num_kv_heads
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if norm is not None:
            qk = norm(qk)
        assert rotation.rows is None, "it does not look up angles"
        qk = self._rope(qk, rotation.cos, rotation.sin)
        q, k = qk[:, : self._spec.num_heads], qk[:, self._spec.num_heads :]
        return self.forward(q, k, k if self._spec.options.shared else v, kv, plan, window, sinks)
