"""The network of a DFlash drafter (arXiv 2602.06036): Qwen3's layers over a block of tokens and a projected context.

Context, once for each position: with c = hidden_norm(fc([the target's hidden states entering some of its layers])), the
keys and values of each layer are its projections of c, with its k_norm and rotation. No layer runs.

Block, at the positions after the context: x = embeddings of [last token, mask, mask, ...]; Qwen3's layers, in which a
token of the block sees the context and the whole block; logits = head(norm(x)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....models.attention import attention_spec, make_attention
from ....models.batch import ForwardBatch, LayerKV
from ....models.layers.linear import Linear
from ....models.layers.norm import RMSNorm
from ....models.layers.rope import RotaryEmbedding
from ....models.layers.weights import WeightSlot
from ....models.model import LanguageModel
from ...verify.draft_sampling import DraftVocabulary
from ..base import PreparedAdapters
from ..checkpoint import check_shared, draft_vocabulary, refuse
from ..step_writer import Places
from .config import DFlashConfig
from .layers import BlockLayer
from .markov import MarkovHead


class DFlashHead:
    """Several layers, built without weights: fill every slot of `weight_slots`, then run it."""

    def __init__(self, config: DFlashConfig, target: LanguageModel, device: str) -> None:
        """`target` lends embeddings and head if the drafter has none.

        Raises:
            InvalidRequestError: its hidden size differs.
        """
        self.config = config
        self.device = torch.device(device)
        self.target = target
        layer = config.layer
        own = {"own_embedding": config.own_embedding, "own_head": config.own_head}
        check_shared("drafter", layer.hidden_size, config.target_hidden_size, **own)
        self.attention = make_attention(attention_spec(layer, self.device))
        self.rope = RotaryEmbedding([layer.rope], layer.head_dim, dtype=layer.dtype, device=self.device)
        common: Any = {"dtype": layer.dtype, "device": self.device}
        fused = len(config.aux_layers) * config.target_hidden_size
        self._fc = Linear("fc", [("fc", layer.hidden_size)], fused, **common)
        self._layers = [BlockLayer(layer, i, self.attention, self.device) for i in range(layer.num_layers)]
        self._hidden_norm, self._final_norm = self._norms = [
            RMSNorm([f"{name}.weight"], layer.hidden_size, layer.rms_norm_eps, **common)
            for name in ("hidden_norm", "norm")
        ]
        self._head: Linear | None = None
        if config.own_head:
            self._head = Linear("lm_head", [("lm_head", config.draft_vocab_size)], layer.hidden_size, **common)
        self.markov = MarkovHead(config, self.device) if config.markov_rank else None
        """DSpark's heads."""
        self._embedding: Tensor | None = None
        self.mask_embedding: Tensor | None = None
        """[hidden size] in place of the mask token's embedding, if the checkpoint has one."""
        self.vocabulary: DraftVocabulary | None = None
        """Set by the slot "d2t"."""

    def linears(self) -> list[Linear]:
        """Projections that draft weights may target, in the order of the computation."""
        return [self._fc, *[linear for layer in self._layers for linear in layer.linears()]]

    def quantizable(self) -> list[Linear]:
        """All projections, the drafter's own output head among them."""
        own = [] if self._head is None else [self._head]
        return [*self.linears(), *own, *([] if self.markov is None else self.markov.linears())]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the drafter needs, by its canonical name."""
        config, slots = self.config, self._fc.weight_slots()
        for part in (*self._layers, *self._norms, self._head, self.markov):
            slots |= {} if part is None else part.weight_slots()
        if config.own_embedding:
            shape = (config.layer.vocab_size, config.layer.hidden_size)
            slots["embed_tokens.weight"] = WeightSlot(shape, self._load_embedding, config.layer.hidden_size**-0.5)
        if config.own_vocabulary:
            slots["d2t"] = WeightSlot((config.draft_vocab_size,), self._load_vocabulary)
        return slots

    def _load_embedding(self, tensor: Tensor) -> None:
        self._embedding = tensor.to(self.device, self.config.layer.dtype, copy=True).contiguous()

    def _load_vocabulary(self, offsets: Tensor) -> None:
        self.vocabulary = draft_vocabulary(offsets, self.config.layer.vocab_size, self.device)

    def load_mask_embedding(self, tensor: Tensor) -> None:
        """Set the mask's embedding [hidden size], maybe with dimensions of 1 before.

        Raises:
            InvalidRequestError: it has another size; with both.
        """
        size = self.config.layer.hidden_size
        if tensor.numel() != size:
            raise refuse(f"mask_embedding.pt has {tensor.numel()} elements, the drafter's hidden size is {size}")
        self.mask_embedding = tensor.to(self.device, self.config.layer.dtype).flatten().contiguous()

    def write_context(self, kv: Sequence[LayerKV], states: Sequence[Tensor], adapters: Any, places: Places) -> Tensor:
        """Write the keys and values of all layers for T tokens, from the target's hidden states [T, H] of them; return
        the context c [T, hidden size]."""
        rows = PreparedAdapters(adapters)
        context = self._hidden_norm(self._fc.forward(torch.cat(list(states), dim=-1), rows))
        rotations = self.rope.rotations(places.positions, places.end)
        for layer, cache in zip(self._layers, kv, strict=True):
            layer.write_context(context, rows, rotations, cache, places.slots)
        return context

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden size] of all tokens of the rows' blocks, after the final norm; the blocks' keys and
        values are written behind their contexts."""
        hidden = self._embed(batch.input_ids)
        for layer, cache in zip(self._layers, batch.kv, strict=True):
            hidden = layer.forward(hidden, batch, cache)
        return self._final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, draft vocabulary] of hidden states [R, hidden size]."""
        if self._head is None:
            return self.target.compute_logits(hidden)
        return self._head.packed(hidden).float()

    def _embed(self, input_ids: Tensor) -> Tensor:
        known = input_ids.clamp(max=self.config.layer.vocab_size - 1)  # an adapter may have more tokens
        if self._embedding is None:
            embedded = self.target.embedding.lookup(known)
        else:
            embedded = F.embedding(known, self._embedding)
        if self.mask_embedding is None:
            return embedded
        is_mask = (input_ids == self.config.mask_token_id).unsqueeze(1)
        return torch.where(is_mask, self.mask_embedding, embedded)
