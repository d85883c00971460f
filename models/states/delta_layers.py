"""Layers with gated delta nets in place of attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaWeights, Projected, delta_net
from ..batch import ForwardBatch, LayerKV
from ..decoder_layer import GeneralLayer
from ..families.state_layers import DeltaNet
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.weights import RenamedSlot, WeightSlot
from ..ranges import Rows
from .convolution import Convolution
from .memory import LayerStates
from .shares import StateShare


class DeltaNetLayer(GeneralLayer):
    """Layer of Qwen3-Next, Qwen3.5 and OLMo Hybrid: a gated delta net in place of attention."""

    def _make_projections(self) -> None:
        config, states = self._config, self._config.states
        assert isinstance(states, DeltaNet), "the config has delta nets"
        self._states, names = states, states.names
        size, keys = states.value_heads * states.value_dim, states.key_heads * states.key_dim
        widths = [states.channels] if len(names.qkv) == 1 else [keys, keys, size]
        self.qkv = self._linear("delta_in", self._inputs(widths), config.hidden_size, bias=False)
        self.o = self._linear("delta_out", {f"{names.module}.{names.out}": config.hidden_size}, size, bias=False)
        self._module = f"{self._theirs}.{names.module}"
        filters = {f"{self._module}.{name}": width for name, width in zip(names.convolutions, widths, strict=True)}
        self._convolution = Convolution(filters, states.kernel, bias=False, **self._common)
        eps = config.rms_norm_eps if states.norm_eps is None else states.norm_eps
        self._norm_heads = RMSNorm([f"{self._module}.{names.norm}.weight"], states.value_dim, eps, **self._common)
        decays = states.value_heads * (states.key_dim if states.by_element else 1)
        self._rows = {"A_log": Rows.whole(states.value_heads), "dt_bias": Rows.whole(decays)}
        self._rate: Tensor | None = None
        self._rate_bias: Tensor | None = None

    def _inputs(self, widths: list[int]) -> dict[str, int]:
        """Modules that project the input, and the rows of each; those of queries, keys and values have `widths`."""
        states, names, heads = self._states, self._states.names, self._states.value_heads
        size = heads * states.value_dim
        parts = dict(zip((*names.qkv, *names.gates), (*widths, size, heads, heads), strict=True))
        if states.merged:
            parts = {"in_proj_qkvz": states.channels + size, "in_proj_ba": 2 * heads}
        return {f"{names.module}.{name}": rows for name, rows in parts.items()}

    def _project(self, normed: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [T, C], the gates [T, H · V], and the logits of beta and of the decay [T, H]."""
        states, heads = self._states, self._states.value_heads
        projected = self.qkv.forward(normed, batch)
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

    def divide(self, share: StateShare) -> None:
        """See SharedStates."""
        self._convolution.divide(share.channels)
        self._rows = {name: part.alone for name, part in share.vectors.items()}

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: LayerKV | LayerStates) -> Tensor:
        assert isinstance(kv, LayerStates), "the layer has states"
        assert batch.states is not None, "the batch has states"
        assert kv.recurrent is not None, "delta nets have a recurrent state"
        assert self._rate is not None, "the loader left no slot empty"
        assert self._rate_bias is not None, "the loader left no slot empty"
        mixed, gate, beta, decay = self._project(normed, batch)
        mixed = self._convolution.forward(mixed, batch.states, kv, silu=True)
        norm, states = self._norm_heads.weight, self._states
        scale, is_kimi = states.beta_scale, states.by_element
        weights = DeltaWeights(self._rate, self._rate_bias, norm, states.key_heads, scale, is_kimi)
        heads = delta_net(Projected(mixed, gate, beta, decay), weights, batch.states, kv.recurrent)
        return self.o.forward(heads, batch)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = super().weight_slots() | self._convolution.weight_slots() | self._norm_heads.weight_slots()
        for name, load in (("A_log", self._load_rate), ("dt_bias", self._load_rate_bias)):
            slots[f"{self._module}.{name}"] = WeightSlot((self._rows[name].total,), load)
        return slots

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See DecoderLayer. transformers has one convolution in OLMo Hybrid, which files may keep."""
        merged = self._convolution.merged_slots(f"{self._module}.conv1d")
        return super().renamed_slots() | (merged if len(self._states.names.convolutions) > 1 else {})

    def _load_rate(self, tensor: Tensor) -> None:
        self._rate = self._rounded(self._rows["A_log"].of(tensor.flatten())).exp()

    def _load_rate_bias(self, tensor: Tensor) -> None:
        self._rate_bias = self._rounded(self._rows["dt_bias"].of(tensor))

    def _rounded(self, tensor: Tensor) -> Tensor:
        """Float32 of a tensor, rounded to the model's dtype first, as in a model that holds its weights in it."""
        return tensor.to(self._common["device"], self._config.dtype, copy=True).float()


class KimiDeltaLayer(DeltaNetLayer):
    """Layer of Kimi Linear: the gate and the decays of each element are two products each."""

    def _make_projections(self) -> None:
        super()._make_projections()
        states, names = self._states, self._states.names
        assert names.wide_gates is not None, "the config has wide gates"
        size, keys = states.value_heads * states.value_dim, states.value_heads * states.key_dim
        parts = zip(("gate_b", "decay_b"), names.wide_gates, (size, keys), strict=True)
        self._wide = [
            self._linear(ours, {f"{names.module}.{theirs}": rows}, states.key_dim, bias=False)
            for ours, theirs, rows in parts
        ]

    def _inputs(self, widths: list[int]) -> dict[str, int]:
        names, size = self._states.names, self._states.key_dim
        rows = *widths, size, self._states.value_heads, size
        return {f"{names.module}.{name}": count for name, count in zip((*names.qkv, *names.gates), rows, strict=True)}

    def _project(self, normed: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As in the base class; the logits of the decays are [T, H · D]."""
        size = self._states.key_dim
        widths = [self._states.channels, size, self._states.value_heads, size]
        mixed, gate, beta, decay = self.qkv.forward(normed, batch).split(widths, 1)
        wide_gate, wide_decay = self._wide
        return mixed, wide_gate.forward(gate.contiguous(), batch), beta, wide_decay.forward(decay.contiguous(), batch)

    def linears(self) -> list[Linear]:
        """See DecoderLayer."""
        first, *others = super().linears()
        return [first, *self._wide, *others]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots, name = super().weight_slots(), f"{self._module}.A_log"
        for linear in self._wide:
            slots |= linear.weight_slots()
        return slots | {name: replace(slots[name], shape=(1, 1, *slots[name].shape, 1))}

    def _load_rate_bias(self, tensor: Tensor) -> None:
        # It stays in float32, as in transformers.
        self._rate_bias = self._rows["dt_bias"].of(tensor).to(self._common["device"], torch.float32, copy=True)
