"""Configuration of a DFlash or DSpark drafter: from its config.json, its tensors, and its target.

Formats: the authors' own (fields on top or in `dflash_config`; `target_layer_ids` are layers whose output is read), and
that of speculators (`aux_hidden_state_layer_ids` are layers whose input is read: larger by one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....kernels.paged_attention import WholeRow, Window
from ....models.batch import KVLayerSpec, kv_dtype
from ....models.checkpoint.json_files import read_json
from ....models.config import DTYPES, DecoderConfig, decoder_config, named_architectures
from ....models.families import FAMILIES
from ..checkpoint import StoredTensor, read_tensors, refuse

if TYPE_CHECKING:
    from ....models.model import ModelConfig

DEEPSPEC = "Qwen3DSparkModel"
"""Architecture of DeepSeek's checkpoints of both methods: those of DFlash have a `markov_rank` of 0."""
ARCHITECTURES = {
    "dflash": ("DFlashDraftModel", "DFlashSpeculator", DEEPSPEC),
    "dspark": (DEEPSPEC, "DSparkDraftModel", "DSparkSpeculator", "DFlashDraftModel"),
}
"""Method -> names in `architectures`. The layers are Qwen3's whatever the target."""
MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""Values of `markov_head_type`; `markov` has their equations."""
MASK_EMBEDDING = "mask_embedding.pt"
"""File of the mask's embedding, which some checkpoints have."""
_KINDS = ("full_attention", "sliding_attention")
_TRAITS = FAMILIES["Qwen3ForCausalLM"]
_NOT_NEEDED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors of public files that follow from others, or are the target's."""
_COMPUTED = "rotary_emb.inv_freq"
# Options that change what is computed, and the only value that is served.
_FIXED: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dflash", "dspark"),
    "shift_label": (False,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "logit_scale": (1.0,),
    "final_logit_softcapping": (0.0,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "fc_layernorm": (False,),
    "is_neox_style": (True,),
    "dspark_backbone_conv_enabled": (False,),
    "use_aux_hidden_state": (True,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """A drafter of several layers."""

    layer: DecoderConfig
    """All layers; the vocabulary is the target's, `hidden_size` the drafter's own."""
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """Target layers whose entering hidden states are fused, in the order of `fc`'s inputs."""
    block_size: int
    """Tokens of the longest block."""
    mask_token_id: int
    sample_from_anchor: bool
    """True: the block's first token predicts the first draft; False: the first mask does."""
    markov_rank: int = 0
    """DSpark: rank of the bias of a draft's logits by the token before; 0: there is none."""
    markov_head: str = "vanilla"
    """One of `MARKOV_HEADS`."""
    has_confidence: bool = False
    confidence_reads_markov: bool = False
    confidence_bias: bool = True
    own_embedding: bool = False
    own_head: bool = False
    own_vocabulary: bool = False
    """There is a `d2t`."""

    @property
    def max_drafts(self) -> int:
        """Most drafts of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """KV that the layers keep of a token."""
        layer = self.layer
        return (KVLayerSpec(layer.num_kv_heads, layer.head_dim),) * layer.num_layers


def head_tensors(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a drafter's directory by their canonical names: layers begin with "model.layers.", others have no
    prefix.

    Raises:
        NotFoundError, InvalidRequestError: see `read_tensors`.
    """
    found = {}
    for name, tensor in read_tensors(path).items():
        name = name.removeprefix("model.")
        if name not in _NOT_NEEDED and not name.endswith(_COMPUTED):
            found[f"model.{name}" if name.startswith("layers.") else name] = tensor
    return found


def read_dflash_config(raw: Mapping[str, Any], method: str, target: ModelConfig) -> DFlashConfig:
    """Read config.json, for a drafter without tensors (`load_format="dummy"`); see `with_tensors`.

    Raises:
        InvalidRequestError: it is no drafter of this method, has an option that is not served, or does not fit the
        target; with both figures.
        UnsupportedModelError: its layers need something that is not supported.
    """
    flat = _flattened(raw)
    _check_kind(raw, flat, method)
    layer = _read_layers(flat, target)
    if layer.vocab_size != target.vocab_size:
        raise refuse(f"the drafter's vocabulary has {layer.vocab_size} tokens, the target's {target.vocab_size}")
    if target.embedding_size != target.hidden_size:
        raise refuse("the target's embeddings and hidden states have different sizes: DFlash drafters are not for it")
    if (scale := getattr(target, "embedding_scale", 1.0)) != 1.0:
        raise refuse(f"the target's embeddings are scaled by {scale}: DFlash drafters of such targets are not served")
    size = _integer(flat, "target_hidden_size", layer.hidden_size)
    if size != target.hidden_size:
        field = "target_hidden_size" if flat.get("target_hidden_size") is not None else "hidden_size"
        raise refuse(f"the drafter's {field} is {size}, the target's hidden size {target.hidden_size}")
    known = flat.get("num_target_layers")
    if known is not None and known != target.num_layers:
        raise refuse(f"num_target_layers of the drafter is {known!r}, the target has {target.num_layers} layers")
    draft_vocab_size = _integer(flat, "draft_vocab_size", target.vocab_size)
    if draft_vocab_size > target.vocab_size:
        raise refuse(f"draft_vocab_size is {draft_vocab_size}, the target's vocabulary {target.vocab_size}")
    mask = flat.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise refuse(
            f"mask_token_id of the drafter is {mask!r}, the target's vocabulary has {target.vocab_size} tokens"
        )
    config = DFlashConfig(
        layer=layer,
        target_hidden_size=size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=_aux_layers(flat, target.num_layers),
        block_size=_integer(flat, "block_size", 16),
        mask_token_id=mask,
        sample_from_anchor=_samples_from_anchor(flat, method),
        **_sequential_heads(flat),
    )
    if config.max_drafts < 1:
        raise refuse(f"block_size of the drafter is {config.block_size}: such a block has no drafts")
    return config


def with_tensors(config: DFlashConfig, names: Collection[str]) -> DFlashConfig:
    """`config` with the properties shown by the `names` of the tensors: which are the drafter's own."""
    smaller = config.draft_vocab_size != config.layer.vocab_size
    return dataclasses.replace(
        config,
        has_confidence=config.has_confidence and "confidence_head.proj.weight" in names,
        confidence_bias="confidence_head.proj.bias" in names,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names or smaller,
        own_vocabulary="d2t" in names or smaller,
    )


def dflash_kv_bytes_per_token(path: Path, dtype_name: str, kv_cache_dtype: str = "auto") -> int:
    """Bytes a token of a drafter's own KV, from config.json alone.

    Raises:
        NotFoundError, InvalidRequestError, UnsupportedModelError: as for any model.
    """
    dtype = DTYPES[dtype_name]
    layer = _decoder(_flattened(read_json(path / "config.json")), dtype)
    return 2 * layer.num_layers * layer.num_kv_heads * layer.head_dim * kv_dtype(dtype, kv_cache_dtype).itemsize


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with all fields on top: those of `dflash_config`, and of the layers, which speculators nest."""
    flat: dict[str, Any] = {}
    for part in (raw.get("transformer_layer_config"), raw, raw.get("dflash_config")):
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise refuse("config.json: transformer_layer_config and dflash_config must be objects")
        flat |= {key: value for key, value in part.items() if value is not None}
    return flat


def _check_kind(raw: Mapping[str, Any], flat: Mapping[str, Any], method: str) -> None:
    """Refuse what is no drafter of this method, and options that are not served."""
    kind = raw.get("speculators_model_type")
    other = "dspark" if method == "dflash" else "dflash"
    if kind is not None and kind != method:
        hint = f": use method {kind!r}" if kind == other else ""
        raise refuse(f"config.json: speculators_model_type is {kind!r}, the method {method!r}{hint}")
    named, known = named_architectures(raw), ARCHITECTURES[method]
    if not any(name in known for name in named) and (kind is None or named):
        hint = f"; use method {other!r}" if any(name in ARCHITECTURES[other] for name in named) else ""
        what = ", ".join(named) or "none"
        raise refuse(f"config.json names architectures {what}; method {method} loads {', '.join(known)}{hint}")
    rank = flat.get("markov_rank", 0)
    if (method == "dspark") != bool(rank):
        raise refuse(f"markov_rank of the drafter is {rank!r}: use method {other!r}")
    for name, served in _FIXED.items():
        if flat.get(name, served[0]) not in served:
            raise refuse(f"config.json: {name} {flat[name]!r} is not served; only {', '.join(map(repr, served))}")


def _decoder(flat: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """The layers as those of a decoder without windows."""
    plain = {name: value for name, value in flat.items() if name not in ("layer_types", "sliding_window")}
    return decoder_config(plain, "dflash", dtype, _TRAITS)


def _read_layers(flat: Mapping[str, Any], target: ModelConfig) -> DecoderConfig:
    layer = _decoder({"vocab_size": target.vocab_size, **flat}, target.dtype)
    if layer.rope.rotary_dim is not None or layer.rope.short_context is not None:
        raise refuse("config.json: rotations of a part of a head, and longrope, are not served for DFlash drafters")
    return dataclasses.replace(
        layer, windows=tuple(_window(flat, index, layer.num_layers) for index in range(layer.num_layers))
    )


def _window(flat: Mapping[str, Any], index: int, num_layers: int) -> Window:
    """Window of a layer. Layers with a sliding window are causal unless the file says otherwise, others are not."""
    types = flat.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _KINDS for kind in types):
        raise refuse(f"config.json: layer_types must be a list of {num_layers} kinds of {_KINDS}, got {types!r}")
    listed = "sliding_attention" in types
    slides = types[index] == "sliding_attention" if listed else _switch(flat, "use_swa")
    named = next((name for name in ("is_causal", "causal") if name in flat), None)
    causal = None if named is None else _switch(flat, named)
    is_causal = slides and not _switch(flat, "sliding_window_non_causal") if causal is None else causal
    if not slides:
        return None if is_causal else WholeRow()
    if not is_causal:
        raise refuse(
            "config.json: a sliding window (layer_types, use_swa) in a layer that is not causal (causal, is_causal, "
            "sliding_window_non_causal) is not served"
        )
    size = flat.get("swa_window_size", flat.get("sliding_window"))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise refuse(f"config.json: sliding layers need sliding_window or swa_window_size, got {size!r}")
    return size


def _aux_layers(flat: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Target layers whose input is read, by either format."""
    field, shift = "aux_hidden_state_layer_ids", 0
    if field not in flat:
        field, shift = "target_layer_ids", 1
    layers = flat.get(field)
    if not isinstance(layers, list) or not 1 <= len(layers) <= num_layers + 1:
        got = f"{len(layers)} of them: {layers[:8]}" if isinstance(layers, list) else repr(layers)
        raise refuse(f"config.json: {field} must be a list of 1 to {num_layers + 1} layers of the target, got {got}")
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index + shift <= num_layers:
            raise refuse(f"{field} of the drafter are {layers}, the target has {num_layers} layers")
    return tuple(index + shift for index in layers)


def _samples_from_anchor(flat: Mapping[str, Any], method: str) -> bool:
    default = method == "dspark" or DEEPSPEC in named_architectures(flat)
    return _switch(flat, "sample_from_anchor", default)


def _sequential_heads(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of DSpark's two heads."""
    rank = flat.get("markov_rank", 0)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise refuse(f"config.json: markov_rank must be an integer from 0 on, got {rank!r}")
    kind = flat.get("markov_head_type", MARKOV_HEADS[0])
    if rank and kind not in MARKOV_HEADS:
        raise refuse(f"config.json: markov_head_type {kind!r} is not served; served are {', '.join(MARKOV_HEADS)}")
    has_confidence = _switch(flat, "enable_confidence_head") and rank > 0
    return {
        "markov_rank": rank,
        "markov_head": kind,
        "has_confidence": has_confidence,
        "confidence_reads_markov": has_confidence and _switch(flat, "confidence_head_with_markov"),
    }


def _switch(flat: Mapping[str, Any], field: str, default: bool = False) -> bool:
    value = flat.get(field, default)
    if not isinstance(value, bool):
        raise refuse(f"config.json: {field} must be true or false, got {value!r}")
    return value


def _integer(flat: Mapping[str, Any], field: str, default: int) -> int:
    value = flat.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(f"config.json: {field} must be a positive integer, got {value!r}")
    return value
