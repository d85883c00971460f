"""The network of a head for multi-token prediction; `models/families/prediction.py` has its equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....models.attention import attention_spec, make_attention
from ....models.batch import ForwardBatch, KVLayerSpec
from ....models.decoder import layer_class
from ....models.layers.linear import Linear
from ....models.layers.norm import RMSNorm
from ....models.layers.weights import RenamedSlot, WeightSlot
from ....models.model import LanguageModel
from ...verify.draft_sampling import DraftVocabulary
from ..eagle.head import LastRows, ShiftedRope
from .config import MtpConfig


class MtpHead:
    """Layers of the target's family, built without weights: fill every slot of `weight_slots`, then run it.

    Token embeddings and output head are the target's.
    """

    vocabulary: DraftVocabulary | None = None
    """None: drafts are of the target's vocabulary."""

    def __init__(self, config: MtpConfig, target: LanguageModel, device: str) -> None:
        self.config = config
        self.device = torch.device(device)
        self._target = target
        layer = config.layer
        self.attention = make_attention(attention_spec(layer, self.device))
        self.rope = ShiftedRope(layer.ropes, layer.head_dim, dtype=layer.dtype, device=self.device)
        common: Any = {"dtype": layer.dtype, "device": self.device}
        self._fc = Linear("fc", [("fc", layer.hidden_size)], 2 * layer.hidden_size, **common)
        self._layers = [layer_class(layer, i)(layer, i, self.attention, self.device) for i in range(layer.num_layers)]
        self._token_norm, self._hidden_norm, self._final_norm = self._norms = [
            RMSNorm([f"{name}.weight"], layer.hidden_size, layer.rms_norm_eps, offset=layer.norm_offset, **common)
            for name in ("token_norm", "hidden_norm", "norm")
        ]

    @property
    def kv_layer(self) -> KVLayerSpec:
        """KV that the layer keeps of a token."""
        return self.config.kv_layer

    def linears(self) -> list[Linear]:
        """In the order of the computation."""
        return [self._fc, *(linear for layer in self._layers for linear in layer.linears())]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the head needs, by its canonical name."""
        slots = self._fc.weight_slots()
        for layer in self._layers:
            slots |= layer.weight_slots()
        for norm in self._norms:
            slots |= norm.weight_slots()
        return slots

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """Slots of tensors that some checkpoints have instead of others."""
        return {name: slot for layer in self._layers for name, slot in layer.mlp.renamed_slots().items()}

    def fuse(self, states: Sequence[Tensor], adapters: Any) -> Tensor:
        """The stored hidden states [T, H]: the target's after its final norm."""
        return states[0]

    def forward(self, batch: ForwardBatch, hidden: Tensor, last: LastRows | None) -> Tensor:
        """Compute a batch; see `EagleHead.forward`. The layers compute all T tokens."""
        parts = [self._token_norm(self._target.embedding.lookup(batch.input_ids)), self._hidden_norm(hidden)]
        if self.config.form.hidden_first:
            parts.reverse()
        x = self._fc.forward(torch.cat(parts, dim=-1), batch)
        for layer in self._layers:
            x = layer.forward(x, batch, batch.kv[0])
        if last is not None:
            (x,) = last.rows.last_of(x)
        return self._final_norm(x) if self.config.form.norm_output else x

    def logits(self, state: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 logits of the next token, [B, vocabulary], from `forward`'s result [B, H]; in `out` if given."""
        if not self.config.form.norm_output:
            state = self._final_norm(state)
        return self._target.compute_logits(state, out=out)
