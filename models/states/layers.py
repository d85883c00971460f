"""Layers with a recurrent state, and the gated attention of models that have them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaWeights, Projected, delta_net
from ..batch import ForwardBatch, LayerKV
from ..decoder_layer import DecoderLayer, GeneralLayer
from ..families.state_layers import DeltaNet, Mamba2, ShortConv, StateLayers
from ..layers.norm import RMSNorm
from ..layers.weights import RenamedSlot, WeightSlot
from .convolution import Convolution
from .mamba_layers import MambaLayer, ParallelMambaLayer
from .memory import LayerStates, StateSpec


def state_layer(states: StateLayers) -> type[DecoderLayer]:
    """Class of the layers with states that have an MLP too."""
    if isinstance(states, Mamba2):
        return MambaLayer if states.attention_factors is None else ParallelMambaLayer
    return ShortConvLayer if isinstance(states, ShortConv) else DeltaNetLayer


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

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        return super().weight_slots() | self._convolution.weight_slots()


class DeltaNetLayer(GeneralLayer):
    """Layer of Qwen3-Next, Qwen3.5 and OLMo Hybrid: a gated delta net in place of attention."""

    def _make_projections(self) -> None:
        config, states = self._config, self._config.states
        assert isinstance(states, DeltaNet), "the config has delta nets"
        self._states, names = states, states.names
        heads, size = states.value_heads, states.value_heads * states.value_dim
        keys = states.key_heads * states.key_dim
        widths = [states.channels] if len(names.qkv) == 1 else [keys, keys, size]
        parts = dict(zip((*names.qkv, *names.gates), (*widths, size, heads, heads), strict=True))
        if states.merged:
            parts = {"in_proj_qkvz": states.channels + size, "in_proj_ba": 2 * heads}
        inputs = {f"linear_attn.{name}": rows for name, rows in parts.items()}
        self.qkv = self._linear("delta_in", inputs, config.hidden_size, bias=False)
        self.o = self._linear("delta_out", {f"linear_attn.{names.out}": config.hidden_size}, size, bias=False)
        self._module = f"{self._theirs}.linear_attn"
        filters = {f"{self._module}.{name}": width for name, width in zip(names.convolutions, widths, strict=True)}
        self._convolution = Convolution(filters, states.kernel, bias=False, **self._common)
        eps = config.rms_norm_eps if states.norm_eps is None else states.norm_eps
        self._norm_heads = RMSNorm([f"{self._module}.{names.norm}.weight"], states.value_dim, eps, **self._common)
        self._rate: Tensor | None = None
        self._rate_bias: Tensor | None = None

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [T, C], the gates [T, H · V], and the logits of beta and of the decay [T, H]."""
        states, heads = self._states, self._states.value_heads
        size = heads * states.value_dim
        if not states.merged:
            mixed, gate, beta, decay = projected.split([states.channels, size, heads, heads], 1)
            return mixed, gate, beta, decay
        first, second = projected.split([states.channels + size, 2 * heads], 1)
        grouped = first.unflatten(1, (states.key_heads, -1))
        widths = [states.key_dim, states.key_dim, *[size // states.key_heads] * 2]
        query, key, value, gate = (part.flatten(1) for part in grouped.split(widths, 2))
        beta, decay = (part.flatten(1) for part in second.unflatten(1, (states.key_heads, 2, -1)).unbind(2))
        return torch.cat((query, key, value), 1), gate, beta, decay

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: LayerKV | LayerStates) -> Tensor:
        assert isinstance(kv, LayerStates), "the layer has states"
        assert batch.states is not None, "the batch has states"
        assert kv.recurrent is not None, "delta nets have a recurrent state"
        assert self._rate is not None, "the loader left no slot empty"
        assert self._rate_bias is not None, "the loader left no slot empty"
        mixed, gate, beta, decay = self._split(self.qkv.forward(normed, batch))
        mixed = self._convolution.forward(mixed, batch.states, kv, silu=True)
        norm, states = self._norm_heads.weight, self._states
        weights = DeltaWeights(self._rate, self._rate_bias, norm, states.key_heads, states.beta_scale)
        heads = delta_net(Projected(mixed, gate, beta, decay), weights, batch.states, kv.recurrent)
        return self.o.forward(heads, batch)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = super().weight_slots() | self._convolution.weight_slots() | self._norm_heads.weight_slots()
        shape = (self._states.value_heads,)
        slots[f"{self._module}.A_log"] = WeightSlot(shape, self._load_rate)
        slots[f"{self._module}.dt_bias"] = WeightSlot(shape, self._load_rate_bias)
        return slots

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See DecoderLayer. transformers' OLMo Hybrid has one convolution, which files may keep."""
        merged = self._convolution.merged_slots(f"{self._module}.conv1d")
        return super().renamed_slots() | (merged if len(self._states.names.convolutions) > 1 else {})

    def _load_rate(self, tensor: Tensor) -> None:
        self._rate = self._rounded(tensor).exp()

    def _load_rate_bias(self, tensor: Tensor) -> None:
        self._rate_bias = self._rounded(tensor)

    def _rounded(self, tensor: Tensor) -> Tensor:
        """Float32 of a tensor, rounded to the model's dtype first, as in a model that holds its weights in it."""
        return tensor.to(self._common["device"], self._config.dtype, copy=True).float()


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
