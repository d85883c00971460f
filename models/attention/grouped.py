"""Attention of a model whose layers have heads of several shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import AttentionBackend, attention_spec, make_attention

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from ...kernels.paged_attention import LayerKV, Window
    from ...kernels.rope import Rotation
    from ..batch import SequenceRows
    from ..config import DecoderConfig
    from ..layers.norm import RMSNorm


class GroupedAttention(AttentionBackend):
    """Backends of several shapes, and one plan for each. Layers compute with the `members`."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        self._backends = backends
        self.looks_up_angles = all(backend.looks_up_angles for backend in backends)
        self.members = [_Member(backend, index) for index, backend in enumerate(backends)]
        """Backends that take the plans of the group."""

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> list[Any]:
        """See AttentionBackend."""
        return [backend.plan(rows, positions, block_size) for backend in self._backends]


class _Member(AttentionBackend):
    """One backend of a group."""

    def __init__(self, backend: AttentionBackend, index: int) -> None:
        self._backend, self._index = backend, index

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> Any:
        """See AttentionBackend."""
        raise NotImplementedError("the group plans")

    def forward_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: RMSNorm | None,
        kv: LayerKV,
        plan: list[Any],
        window: Window,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend; `plan` is the group's."""
        return self._backend.forward_qkv(qkv, rotation, norm, kv, plan[self._index], window, sinks)


def make_layer_attention(
    config: DecoderConfig, device: torch.device
) -> tuple[AttentionBackend, Sequence[AttentionBackend]]:
    """Backend of a decoder, and that of each layer."""
    specs = [attention_spec(config.of_layer(index), device) for index in range(config.num_layers)]
    distinct = list(dict.fromkeys(specs))
    backends = [make_attention(spec, batch_invariant=config.batch_invariant) for spec in distinct]
    if len(backends) == 1:
        return backends[0], backends * config.num_layers
    group = GroupedAttention(backends)
    return group, [group.members[distinct.index(spec)] for spec in specs]
