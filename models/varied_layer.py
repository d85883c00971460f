"""Layer that differs from others of its model in its heads, may read an earlier layer's keys, and may have an input of
its own."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import ForwardBatch, LayerKV
from .decoder_layer import GeneralLayer
from .layers.layer_inputs import InputGate
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.side_experts import SideExpertLayers
from .layers.weights import RenamedSlot, WeightSlot


class VariedLayer(GeneralLayer):
    """Layer of a model with `VariedLayers`. Its config is that of the layer."""

    def _make_projections(self) -> None:
        config, varied = self._config, self._config.varied
        assert varied is not None, "the config has varied layers"
        self._varied = varied
        self._has_keys = varied.kv_sources[self._index] == self._index
        self._heads, self._keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        slices, norms, repeats = {"self_attn.q_proj": self._heads}, ["self_attn.q_norm"], [config.num_heads]
        if self._has_keys:
            slices["self_attn.k_proj"] = self._keys
            norms, repeats = [*norms, "self_attn.k_norm"], [*repeats, config.num_kv_heads]
            if self._index not in varied.keys_as_values:
                slices["self_attn.v_proj"] = self._keys
        self.qkv = self._linear("qkv", slices, config.hidden_size, bias=config.qkv_bias)
        self.o = self._linear("o", {"self_attn.o_proj": config.hidden_size}, self._heads, bias=config.o_bias)
        self.qk_norm = self._norm(norms, config.head_dim, repeats)
        self._value_norm = RMSNorm.unscaled([config.head_dim], config.rms_norm_eps, **self._common)
        self._make_sides()

    def _make_sides(self) -> None:
        """Make what only some models have: an input of the layer's own, and experts alongside the MLP."""
        config, varied, hidden = self._config, self._varied, self._config.hidden_size
        self._scale = 1.0
        self._gate: InputGate | None = None
        if varied.input_size:
            down = self._linear("input_gate", {"per_layer_input_gate": varied.input_size}, hidden, bias=False)
            up = self._linear("input_up", {"per_layer_projection": hidden}, varied.input_size, bias=False)
            self._gate = InputGate(down, up, self._norm(["post_per_layer_input_norm"], hidden), config)
        self.experts: SideExpertLayers | None = None
        if varied.experts is not None:
            self.experts = SideExpertLayers(self._ours, self._theirs, config, self._common["device"])
            names = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
            self._side_norms = [self._norm([name], hidden) for name in names]

    def forward_deferred(
        self, hidden: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer."""
        hidden, delta = super().forward_deferred(hidden, delta, batch, kv)
        if self._gate is not None:
            assert batch.layer_inputs is not None, "the decoder computes them"
            hidden = hidden + delta
            delta = self._gate.forward(hidden, batch.layer_inputs[:, self._index], batch)
        return (hidden, delta) if self._scale == 1.0 else (hidden * self._scale, delta * self._scale)

    def _mix(self, normed: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        qkv = self.qkv.forward(normed, batch)
        if self._has_keys:
            size = self._config.head_dim
            queries_keys = qkv[:, : self._heads + self._keys]
            values = qkv[:, -self._keys :].reshape(len(qkv), -1, size)  # the keys, if nothing follows them
            qkv = torch.cat((queries_keys, self._value_norm(values).flatten(1)), 1)
        return self.o.forward(self._attend_qkv(qkv, batch, kv), batch)

    def _feed(self, normed: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        result = super()._feed(normed, hidden, batch)
        if self.experts is None:
            return result
        before, after_mlp, after = self._side_norms
        return after_mlp(result).add_(after(self.experts.forward(hidden, before(hidden), batch)))

    def linears(self) -> list[Linear]:
        """See DecoderLayer."""
        sides = [part.linears() for part in (self.experts, self._gate) if part is not None]
        return [*super().linears(), *(linear for side in sides for linear in side)]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See DecoderLayer."""
        slots = super().weight_slots()
        if self.experts is not None:
            slots |= self.experts.weight_slots()
        for linear in self._gate.linears() if self._gate is not None else ():
            slots |= linear.weight_slots()
        if self._varied.scaled:
            slots[f"{self._theirs}.layer_scalar"] = WeightSlot((1,), self._load_scale)
        return slots

    def unused_tensors(self) -> list[str]:
        """Names of the weights that older files have for keys and values which are those of another layer."""
        parts = () if self._has_keys else ("k_proj", "v_proj", "k_norm", "v_norm")
        return [f"{self._theirs}.self_attn.{part}.weight" for part in parts]

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """See DecoderLayer."""
        return {} if self.experts is None else self.experts.renamed_slots()

    def _load_scale(self, tensor: Tensor) -> None:
        self._scale = float(tensor.to(self._config.dtype))
