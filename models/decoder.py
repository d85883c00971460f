"""Decoder of all supported families, which differ in their DecoderConfig alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.rms_norm import adds_residuals
from .attention.grouped import make_layer_attention
from .batch import ForwardBatch, KVLayerSpec
from .batch_invariance import check_batch_invariance
from .chunked_layer import ChunkedLayer
from .config import DecoderConfig
from .decoder_layer import DecoderLayer, GeneralLayer
from .families import PRE_NORMS
from .gpt_layer import GPTEnds, GPTLayer
from .latent_layer import LatentLayer
from .layers.cache_scales import CacheScales
from .layers.embedding import EMBEDDING, Embedding, EmbeddingScales, VocabularyNames
from .layers.layer_inputs import LayerInputs
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.rope import RotaryEmbedding
from .layers.score_head import ScoreHead
from .layers.weights import RenamedSlot, WeightSlot
from .model import DecoderOutput
from .states.layers import GatedAttentionLayer, state_layer, state_specs
from .states.mamba_layers import SINGLE_LAYERS, FloatResidual, has_float_residual
from .states.memory import StateSpec
from .stream_layer import StreamEnds, StreamLayer
from .varied_layer import VariedLayer


def layer_class(config: DecoderConfig, index: int) -> type[DecoderLayer]:
    """Class of a layer that is not of the GPT shape."""
    if config.mixers:
        return SINGLE_LAYERS[config.mixers[index]]
    if config.states is not None and index in config.states.layers:
        return state_layer(config.states)
    if config.latent is not None:
        return LatentLayer
    if config.varied is not None:
        return VariedLayer if config.varied.streams is None else StreamLayer
    is_usual = config.norms == PRE_NORMS and config.residual_scale == 1.0 and config.query_scaling is None
    if config.gated_attention:
        return GatedAttentionLayer
    if config.chunked is not None:
        return ChunkedLayer
    return DecoderLayer if is_usual and not config.qk_norm_wide and not config.sinks else GeneralLayer


def _cache_parts(config: DecoderConfig) -> list[tuple[bool, bool]] | None:
    """True for each layer with KV, and for each with a state; None: all have KV alone."""
    attending, states = config.attention_layers, frozenset() if config.states is None else config.states.layers
    parts = [(index in attending, index in states) for index in range(config.num_layers)]
    return None if set(parts) == {(True, False)} else parts


class Decoder:
    """Causal language model. It is built without weights: fill every slot of `weight_slots`, then run it. Implements
    LanguageModel."""

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu") -> None:
        """Build it.

        Raises:
            InvalidRequestError: the config is `batch_invariant`, and the device has no such kernel for something in it.
        """
        self.config = config
        self.whole_config = config
        """Config of the whole model, of which this may be a rank's share."""
        self.device = torch.device(device)
        check_batch_invariance(config, self.device)
        self.attention, by_layer = make_layer_attention(config, self.device)
        self.rope = RotaryEmbedding(config.ropes, config.head_dim, dtype=config.dtype, device=self.device)
        common: Any = {"dtype": config.dtype, "device": self.device, "batch_invariant": config.batch_invariant}
        shape, eps = (config.vocab_size, config.embedding_size), config.rms_norm_eps
        scales = EmbeddingScales(config.embedding_scale, config.logit_scale, config.logit_cap)
        block, invariant = config.block, config.batch_invariant
        self._parts = _cache_parts(config)
        self.score = None if config.score is None else ScoreHead(config.score, config.hidden_size, self.device)
        self.layers: Sequence[DecoderLayer | GPTLayer]
        self._ends: GPTEnds | StreamEnds | FloatResidual | None = None
        self._inputs = LayerInputs(config, self.device) if config.varied and config.varied.input_size else None
        self._deferring: Sequence[DecoderLayer] = ()
        """The layers if norms add the residual stream."""
        if block is None:
            layers = [
                layer_class(config, i)(config.of_layer(i), i, attention, self.device)
                for i, attention in enumerate(by_layer)
            ]
            self.layers, self._deferring = layers, layers if adds_residuals(self.device) and not invariant else ()
            names = VocabularyNames(config.names.get(EMBEDDING, EMBEDDING))
            self.embedding = Embedding(*shape, tied=config.tie_word_embeddings, scales=scales, names=names, **common)
            self._final_norm = RMSNorm(
                [f"{config.names.get('model.norm', 'model.norm')}.weight"],
                config.hidden_size,
                eps,
                offset=config.norm_offset,
                **common,
            )
            if config.varied is not None and config.varied.streams is not None:
                self._deferring, self._ends = (), StreamEnds(config, self._final_norm, self.device)
            if has_float_residual(config):
                self._deferring, self._ends = (), FloatResidual(self._final_norm, config.dtype)
        else:
            self.layers = [GPTLayer(config, block, i, self.attention, self.device) for i in range(config.num_layers)]
            names = VocabularyNames(block.embedding, block.head, block.head_bias)
            self.embedding = Embedding(*shape, tied=config.tie_word_embeddings, names=names, scales=scales, **common)
            self._ends = GPTEnds(config, block, self.device)

    @property
    def kv_layers(self) -> list[KVLayerSpec]:
        """See LanguageModel."""
        is_latent = self.config.latent is not None
        return [KVLayerSpec(heads, size, shared=is_latent) for heads, size in self.config.kv_shapes]

    @property
    def state_layers(self) -> list[StateSpec]:
        """See LanguageModel."""
        return state_specs(self.config.states)

    @property
    def num_parameters(self) -> int:
        """See LanguageModel."""
        return sum(torch.Size(slot.shape).numel() for slot in self.weight_slots().values())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, aux_layers: Sequence[int] = ()) -> DecoderOutput:
        """See LanguageModel."""
        hidden = self.embedding.lookup(batch.input_ids, batch.adapters)
        if self._inputs is not None:
            batch = replace(batch, layer_inputs=self._inputs.forward(hidden, batch))
        if self._ends is not None:
            hidden = self._ends.enter(hidden, batch)
        if self._deferring:
            return self._forward_deferred(hidden, batch, aux_layers)
        entering: dict[int, Tensor] = {}
        for index, (layer, kv) in enumerate(zip(self.layers, self._caches(batch), strict=True)):
            if index in aux_layers:
                entering[index] = self._active(hidden)
            hidden = layer.forward(hidden, batch, kv)
        last = len(self.layers)
        entering[last] = self._active(hidden)
        normed = self._final_norm(hidden) if self._ends is None else self._ends.leave(hidden, batch)
        return DecoderOutput(normed, tuple(map(entering.__getitem__, aux_layers)))

    def _active(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] that layers compute, of one or several streams, in the model's dtype."""
        streams = None if self.config.varied is None else self.config.varied.streams
        return (hidden if streams is None else hidden[streams.active]).to(self.config.dtype)

    def _forward_deferred(self, hidden: Tensor, batch: ForwardBatch, aux_layers: Sequence[int]) -> DecoderOutput:
        """Compute a batch with one launch less for each projection: norms add the residual stream."""
        entering: dict[int, Tensor] = {}
        delta: Tensor | None = None
        for index, (layer, kv) in enumerate(zip(self._deferring, self._caches(batch), strict=True)):
            if index in aux_layers:
                hidden, delta = hidden if delta is None else hidden + delta, None
                entering[index] = hidden
            hidden, delta = layer.forward_deferred(hidden, delta, batch, kv)
        if delta is None:
            normed, entering[len(self.layers)] = self._final_norm(hidden), hidden
        else:
            normed, entering[len(self.layers)] = self._final_norm.add(delta, hidden)
        return DecoderOutput(normed, tuple(map(entering.__getitem__, aux_layers)))

    def _caches(self, batch: ForwardBatch) -> Iterable[Any]:
        """The part of the cache of each layer: its KV, its states, both, or None."""
        if (varied := self.config.varied) is not None:
            indices = {owner: index for index, owner in enumerate(varied.owners)}
            return [batch.kv[indices[source]] for source in varied.kv_sources]
        if self._parts is None:
            return batch.kv
        kv, memory = iter(batch.kv), iter(batch.memory_of_states() if self.config.states is not None else ())
        found: list[Any] = []
        for attends, has_state in self._parts:
            parts = [next(source) for source, has in ((memory, has_state), (kv, attends)) if has]
            found.append(parts if len(parts) > 1 else next(iter(parts), None))
        return found

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, adapters: Any = None, out: Tensor | None = None) -> Tensor:
        """See LanguageModel."""
        return self.embedding.logits(hidden, adapters, out)

    def linears(self) -> list[Linear]:
        """See LanguageModel."""
        parts = [part for part in (self._inputs, *self.layers, self._ends) if part is not None]
        return [linear for part in parts for linear in part.linears()]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See LanguageModel."""
        slots = self.embedding.weight_slots()
        for part in (self._inputs, *self.layers, self._final_norm if self._ends is None else self._ends):
            slots.update({} if part is None else part.weight_slots())
        return slots if self.score is None else slots | self.score.weight_slots()

    def weight_parts(self) -> list[Any]:
        """Objects that hold all weights, the layers first; None for parts that it does not have. Two decoders of one
        config have the same parts."""
        ends = self._final_norm if self._ends is None else self._ends
        return [*self.layers, self.embedding, self._inputs, ends, self.score]

    def weights_changed(self) -> None:
        """Drop what was computed from weights that are now others."""
        for scales in self.cache_scales().values():
            scales.weights_changed()

    def unused_tensors(self) -> set[str]:
        """Names of tensors that some checkpoints have, and that nothing reads."""
        return {name for layer in self.layers if isinstance(layer, VariedLayer) for name in layer.unused_tensors()}

    def cache_scales(self) -> dict[str, CacheScales]:
        """Scales of the fp8 cache of each layer that may have some, by the name of its attention in checkpoints."""
        layers = enumerate(self.layers if self.config.latent is None and self.config.varied is None else ())
        scales = {i: layer.cache_scales for i, layer in layers if isinstance(layer, DecoderLayer)}
        return {f"model.layers.{index}.self_attn": of_layer for index, of_layer in scales.items()}

    def renamed_slots(self) -> dict[str, RenamedSlot]:
        """Slots of tensors that some checkpoints have instead of others."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return {name: slot for layer in layers for name, slot in layer.renamed_slots().items()}
