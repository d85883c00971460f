"""Configuration of an EAGLE head: from its config.json, its tensors, and its target.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (EAGLE-2 has the same weights);
Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test";
Hui et al. 2026, "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....models.batch import kv_dtype
from ....models.checkpoint.json_files import read_json
from ....models.config import DTYPES, DecoderConfig, decoder_config, named_architectures
from ....models.families import FAMILIES, FamilyTraits
from ..checkpoint import StoredTensor, read_tensors, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ....models.model import ModelConfig

_FAMILIES = tuple(name.removesuffix("ForCausalLM") for name, traits in FAMILIES.items() if traits.block is None)
ARCHITECTURES = {
    "eagle": tuple(
        pattern.format(family)
        for pattern in ("{}ForCausalLM", "Eagle{}ForCausalLM", "{}ForCausalLMEagle")
        for family in _FAMILIES
    ),
    "eagle3": (
        *(
            pattern.format(family)
            for pattern in (
                *("{}ForCausalLM", "Eagle3{}ForCausalLM", "Eagle{}ForCausalLM", "{}ForCausalLMEagle3"),
                "Peagle{}ForCausalLM",
            )
            for family in _FAMILIES
        ),
        "Eagle3Speculator",
        "Eagle3DraftModel",
        "PEagleSpeculator",
        "PEagleDraftModel",
    ),
}
"""Method -> names in `architectures`. The layers are Llama's for every family; tensors show biases and Qwen3's norms of
queries and keys."""
_TRAITS = FamilyTraits(defaults={"vocab_size": 32000, "max_position_embeddings": 2048}, window_switch=True)
_LAYER = "layers.0."
HIDDEN_NORM = f"{_LAYER}hidden_norm.weight"
"""Tensor that every EAGLE-3 head has, and no EAGLE-1/2 head."""
# Tensors of public files that follow from others.
_NOT_NEEDED = ("t2d",)
_COMPUTED = "rotary_emb.inv_freq"
MASK = "mask_hidden"
"""Tensor that P-EAGLE heads alone have: hidden states of a mask, in place of the target's."""
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A head."""

    eagle3: bool
    layer: DecoderConfig
    """Its layers; the vocabulary is the target's, `hidden_size` the head's own."""
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """EAGLE-3: target layers whose entering hidden states are fused, in the order of `fc`'s inputs."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual stream starts with the normalised hidden state."""
    norm_before_fc: bool = False
    """EAGLE-3: one norm over the concatenated hidden states (`input_norm`)."""
    fc_norm: bool = False
    """EAGLE-3: a norm for each of them (`fc_norm.i`)."""
    norm_output: bool = False
    """EAGLE-3: the next step is fed the hidden state after the final norm."""
    mask_token_id: int | None = None
    """P-EAGLE: the token that stands for drafts not made yet; None: drafts are made one after the other."""
    fc_bias: bool = False
    own_embedding: bool = False
    """False: the head uses the target's embedding."""
    own_head: bool = False
    """False: the head uses the target's output head."""
    own_vocabulary: bool = False
    """There is a `d2t`."""

    @property
    def several_layers(self) -> bool:
        """True for EAGLE-3 heads of more than one layer."""
        return self.layer.num_layers > 1

    @property
    def drafts_in_parallel(self) -> bool:
        """True for P-EAGLE heads."""
        return self.mask_token_id is not None


def canonical_name(name: str) -> str:
    """Canonical name of a tensor: "layers.0." for the first layer, no "model." in front."""
    name = name.removeprefix("model.")
    return _LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def head_tensors(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a head's directory by their canonical names, without those that follow from others.

    Raises:
        NotFoundError, InvalidRequestError: see `read_tensors`.
    """
    tensors = {
        canonical_name(name): tensor
        for name, tensor in read_tensors(path).items()
        if name not in _NOT_NEEDED and not name.endswith(_COMPUTED)
    }
    if MASK in tensors:  # public files have one or two dimensions of 1 before
        mask = tensors[MASK]
        tensors[MASK] = StoredTensor((math.prod(mask.shape),), lambda: mask.dense().flatten())
    return tensors


def read_eagle_config(raw: Mapping[str, Any], method: str, target: ModelConfig) -> EagleConfig:
    """Read config.json, for a head without tensors (`load_format="dummy"`); see `with_tensors`.

    Raises:
        InvalidRequestError: it is no head of this method, or does not fit the target; with both figures.
        UnsupportedModelError: its layer needs something that is not supported.
    """
    flat = _flattened(raw)
    _check_architecture(raw, method)
    if target.embedding_size != target.hidden_size:
        raise refuse("the target's embeddings and hidden states have different sizes: EAGLE heads are not for it")
    eagle3 = method == "eagle3"
    layer = decoder_config(flat, "eagle", target.dtype, _TRAITS)
    if layer.num_layers != 1 and not eagle3:
        raise refuse(f"an EAGLE-1/2 head has 1 layer, this one has num_hidden_layers {layer.num_layers}")
    if layer.hidden_size % 2:
        raise refuse(f"hidden_size {layer.hidden_size} of the head is odd")
    if "vocab_size" in flat and layer.vocab_size != target.vocab_size:
        raise refuse(f"the head's vocabulary has {layer.vocab_size} tokens, the target's {target.vocab_size}")
    if eagle3:
        own = {**_object(flat, "eagle_config"), **flat}
        config = EagleConfig(
            eagle3=True,
            layer=dataclasses.replace(layer, vocab_size=target.vocab_size),
            target_hidden_size=_target_hidden_size(flat, layer, target),
            draft_vocab_size=_integer(flat, "draft_vocab_size", target.vocab_size),
            aux_layers=_aux_layers(own, target.num_layers),
            **{
                name: bool(own.get(name))
                for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            },
            mask_token_id=_mask_token(own, target.vocab_size),
        )
        if config.draft_vocab_size > target.vocab_size:
            raise refuse(f"draft_vocab_size is {config.draft_vocab_size}, the target's vocabulary {target.vocab_size}")
        return config
    if layer.hidden_size != target.hidden_size:
        raise refuse(f"the head's hidden_size is {layer.hidden_size}, the target's {target.hidden_size}")
    return EagleConfig(
        eagle3=False,
        layer=dataclasses.replace(layer, vocab_size=target.vocab_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(),
        fc_bias=bool(flat.get("bias", True)),
    )


def with_tensors(config: EagleConfig, names: Collection[str]) -> EagleConfig:
    """`config` with the properties shown by the `names` of the tensors: biases, norms, and which tensors are the head's
    own.

    Raises:
        InvalidRequestError: the tensors are those of the other generation of heads.
    """
    if config.eagle3 != (HIDDEN_NORM in names):
        found, wanted = ("EAGLE-1/2", "eagle") if config.eagle3 else ("EAGLE-3", "eagle3")
        raise refuse(f"these are {found} weights ({HIDDEN_NORM}): use method {wanted!r}")

    def any_bias(*modules: str) -> bool:
        return any(f"{_LAYER}{module}.bias" in names for module in modules)

    layer = dataclasses.replace(
        config.layer,
        qkv_bias=any_bias("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o_bias=any_bias("self_attn.o_proj"),
        mlp_bias=any_bias("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        qk_norm=f"{_LAYER}self_attn.q_norm.weight" in names,
    )
    return dataclasses.replace(
        config,
        layer=layer,
        fc_bias="fc.bias" in names,
        norm_before_fc=config.norm_before_fc or "input_norm.weight" in names,
        fc_norm=config.fc_norm or "fc_norm.0.weight" in names,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names or config.draft_vocab_size != config.layer.vocab_size,
        own_vocabulary="d2t" in names or config.draft_vocab_size != config.layer.vocab_size,
    )


def eagle_kv_bytes_per_token(path: str | Path, dtype_name: str, kv_cache_dtype: str = "auto") -> int:
    """Bytes a token of a head's own KV and of the hidden states that it keeps, from config.json alone.

    Raises:
        NotFoundError, InvalidRequestError, UnsupportedModelError: as for any model.
    """
    dtype = DTYPES[dtype_name]
    layer = decoder_config(_flattened(read_json(Path(path) / "config.json")), "eagle", dtype, _TRAITS)
    kv_bytes = 2 * layer.num_kv_heads * layer.head_dim * kv_dtype(dtype, kv_cache_dtype).itemsize
    return layer.num_layers * kv_bytes + layer.hidden_size * dtype.itemsize


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the layer's fields on top (the speculators format nests them)."""
    nested = _object(raw, "transformer_layer_config")
    return {**nested, **{key: value for key, value in raw.items() if value is not None}}


def _object(raw: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The object `field`, an empty one if it is absent or null."""
    value = raw.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(f"config.json: {field} is not an object")
    return value


def _check_architecture(raw: Mapping[str, Any], method: str) -> None:
    kind = raw.get("speculators_model_type")
    if kind is not None and (kind if kind != "peagle" else "eagle3") != method:
        raise refuse(f"config.json: speculators_model_type is {kind!r}, the method {method!r}")
    named = named_architectures(raw)
    known = ARCHITECTURES[method]
    if any(name in known for name in named) or (kind is not None and not named):
        return
    other = "eagle" if method == "eagle3" else "eagle3"
    hint = f"; use method {other!r}" if any(name in ARCHITECTURES[other] for name in named) else ""
    what = ", ".join(named) or "none"
    raise refuse(f"config.json names architectures {what}; method {method} loads {', '.join(known)}{hint}")


def _target_hidden_size(flat: Mapping[str, Any], layer: DecoderConfig, target: ModelConfig) -> int:
    size = _integer(flat, "target_hidden_size", layer.hidden_size)
    if size != target.hidden_size:
        field = "target_hidden_size" if flat.get("target_hidden_size") is not None else "hidden_size"
        raise refuse(f"the head's {field} is {size}, the target's hidden size {target.hidden_size}")
    return size


def _aux_layers(own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    given = own.get("eagle_aux_hidden_state_layer_ids")
    layers: Sequence[Any] = (2, num_layers // 2, num_layers - 3) if given is None else given
    if not isinstance(layers, (list, tuple)) or not 1 <= len(layers) <= num_layers + 1:
        got = f"{len(layers)} of them: {list(layers[:8])}" if isinstance(layers, (list, tuple)) else repr(layers)
        raise refuse(
            f"eagle_aux_hidden_state_layer_ids must be a list of 1 to {num_layers + 1} layers of the target, got {got}"
        )
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= num_layers:
            default = " (the default: the head names none)" if given is None else ""
            raise refuse(
                f"eagle_aux_hidden_state_layer_ids are {list(layers)}{default}, the target has {num_layers} layers"
            )
    return tuple(layers)


def _mask_token(own: Mapping[str, Any], vocab_size: int) -> int | None:
    """See `EagleConfig.mask_token_id`.

    Raises:
        InvalidRequestError: a P-EAGLE head names no token of the target.
    """
    named = any(own.get(field) is not None for field in _MASK_TOKENS[1:])
    if not named and not own.get("parallel_drafting") and own.get("speculators_model_type") != "peagle":
        return None
    field = next((field for field in _MASK_TOKENS if own.get(field) is not None), None)
    if field is None:
        raise refuse(f"config.json: a P-EAGLE head needs one of {', '.join(_MASK_TOKENS)}")
    token = own[field]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise refuse(f"config.json: {field} must be one of the target's {vocab_size} tokens, got {token!r}")
    return token


def _integer(flat: Mapping[str, Any], field: str, default: int) -> int:
    value = flat.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(f"config.json: {field} must be a positive integer, got {value!r}")
    return value
