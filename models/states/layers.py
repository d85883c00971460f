"""Layers with a recurrent state, and the gated attention of models that have them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import ForwardBatch, LayerKV
from ..decoder_layer import DecoderLayer, GeneralLayer
from ..families.state_layers import Mamba2, ShortConv, StateLayers
from ..layers.weights import WeightSlot
from .convolution import Convolution
from .delta_layers import DeltaNetLayer, KimiDeltaLayer
from .mamba_layers import MambaLayer, ParallelMambaLayer
from .memory import LayerStates, StateSpec
from .shares import StateShare


def state_layer(states: StateLayers) -> type[DecoderLayer]:
    """Class of the layers with states that have an MLP too."""
    if isinstance(states, Mamba2):
        return MambaLayer if states.attention_factors is None else ParallelMambaLayer
    if isinstance(states, ShortConv):
        return ShortConvLayer
    return KimiDeltaLayer if states.by_element else DeltaNetLayer


def state_specs(states: StateLayers | None) -> list[StateSpec]:
    """State of each layer that has one."""
    if states is None:
        return []
    return [StateSpec((states.kernel - 1, states.channels), states.recurrent)] * len(states.layers)


class ShortConvLayer(GeneralLayer):
    """Layer of LFM2: out(C · conv(B · x)), with B, C and x of one projection of the input, in place of attention."""

    def _make_projections(self) -> None:
        config, states = self._config, self._config.states
        assert isinstance(states, ShortConv), "the config has short convolutions"
        size = states.channels
        self.qkv = self._linear("conv_in", {"conv.in_proj": 3 * size}, config.hidden_size, bias=states.bias)
        self.o = self._linear("conv_out", {"conv.out_proj": config.hidden_size}, size, bias=states.bias)
        parts = {f"{self._theirs}.conv.conv": size}
        self._convolution = Convolution(parts, states.kernel, bias=states.bias, **self._common)

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: LayerKV | LayerStates) -> Tensor:
        assert isinstance(kv, LayerStates), "the layer has states"
        assert batch.states is not None, "the batch has states"
        b, c, x = self.qkv.forward(normed, batch).chunk(3, 1)
        return self.o.forward(c * self._convolution.forward(b * x, batch.states, kv), batch)

    def divide(self, share: StateShare) -> None:
        """See SharedStates."""
        self._convolution.divide(share.channels)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        return super().weight_slots() | self._convolution.weight_slots()


class GatedAttentionLayer(GeneralLayer):
    """Layer of Qwen3-Next and Qwen3.5: each head's result is multiplied by the sigmoid of a gate."""

    def _make_projections(self) -> None:
        super()._make_projections()
        config = self._config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"self_attn.q_proj": 2 * heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
        self.qkv = self._linear("qkv", qkv, config.hidden_size, bias=config.qkv_bias)

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        config = self._config
        both, others = self.qkv.forward(normed, batch).tensor_split([2 * config.num_heads * config.head_dim], 1)
        query, gate = both.unflatten(1, (config.num_heads, 2, -1)).unbind(2)
        attended = self._attend_qkv(torch.cat((query.flatten(1), others), 1), batch, kv)
        return self.o.forward(attended * gate.flatten(1).sigmoid(), batch)
