"""A layer of a DFlash drafter: Qwen3's, whose keys and values of the context come from the target's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels.paged_attention import write_kv
from ....kernels.rope import Rotation, apply_rope
from ....models.batch import LayerKV
from ....models.decoder_layer import DecoderLayer
from ....models.layers.linear import AdapterRows, Linear
from ....models.layers.weights import WeightSlot


class SplitProjection:
    """Projection of queries, and one of keys and values, which alone is computed for the context."""

    def __init__(self, queries: Linear, keys_values: Linear) -> None:
        self.queries, self.keys_values = queries, keys_values

    def forward(self, x: Tensor, batch: AdapterRows) -> Tensor:
        """[T, (H + 2 Hk) · D] from x [T, hidden size]."""
        return torch.cat((self.queries.forward(x, batch), self.keys_values.forward(x, batch)), -1)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of both."""
        return self.queries.weight_slots() | self.keys_values.weight_slots()


class BlockLayer(DecoderLayer):
    """Qwen3's layer with a projection of the context."""

    def _make_qkv(self, heads: int, kv_heads: int) -> Any:
        hidden, bias = self._config.hidden_size, self._config.qkv_bias
        queries = self._linear("q", {"self_attn.q_proj": heads}, hidden, bias=bias)
        modules = {"self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
        self._split = SplitProjection(queries, self._linear("kv", modules, hidden, bias=bias))
        return self._split

    def linears(self) -> list[Linear]:
        """In the order of the computation."""
        return [self._split.queries, self._split.keys_values, self.o, *self.mlp.linears()]

    def write_context(
        self, context: Tensor, adapters: AdapterRows, rotations: tuple[Rotation, ...], kv: LayerKV, slots: Tensor
    ) -> None:
        """Write the keys and values of context states [T, hidden size] to `slots` [T] of the layer's cache."""
        heads = self._split.keys_values.forward(context, adapters).view(len(context), -1, self._config.head_dim)
        keys, values = (part.contiguous() for part in heads.chunk(2, dim=1))
        assert self.qk_norm is not None, "a layer of Qwen3"
        rotation = rotations[self._rope]
        keys = apply_rope(self.qk_norm.of_heads(self._config.num_heads)(keys), rotation.cos, rotation.sin)
        write_kv(keys, values, kv, slots)
