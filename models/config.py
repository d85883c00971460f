"""Frozen config of a decoder, read from a HF `config.json` once and checked there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..kernels.paged_attention import Window
from ..platform.core.errors import UnsupportedModelError
from .config_values import check_values, number, positive, shown, wrong
from .expert_config import ExpertConfig, read_experts
from .families import CLASSIFIER, PRE_NORMS, FamilyTraits, NormNames, find_traits, supported_architectures
from .families.block import Block
from .families.chunked_layers import ChunkedLayers
from .families.gguf_states import FOLDED
from .families.state_layers import StateLayers
from .families.varied_layers import VariedLayers
from .latent_config import LatentConfig, latent_scale, read_latent
from .layers.activation import PLAIN_ACTIVATIONS
from .layers.score_head import ScoreConfig, read_score
from .quantization import Format, read_format
from .rope_config import RopeConfig, context_length, layer_ropes, query_scaling
from .window_config import layer_types, layer_windows

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
}
"""Activation of a gated MLP by its names in `hidden_act`."""
_OF_FAMILY = (
    *("qk_norm_wide", "sinks", "gated_attention", "names", "norms", "norm_offset"),
    *("state_norms", "aliases"),
    *("merged_qkv", "merged_gate_up", "plain_mlp"),
)
"""Fields of a DecoderConfig that the family's traits have too."""
PLAIN_NAMES = {name: name for name in PLAIN_ACTIVATIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Decoder of the Llama shape; families differ in these fields only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_extra_layers: int = 0
    """Layers of the checkpoint after these, which predict further tokens. They are not loaded."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Context length in tokens: config.json's, times the factor of a linear or YaRN rope scaling, and at most the
    family's bound."""
    rms_norm_eps: float
    rope: RopeConfig
    """Rotation of all layers; if they differ (`layer_ropes`), that of layers which see everything."""
    tie_word_embeddings: bool
    windows: tuple[Window, ...]
    """Window of each layer: a query sees itself and the window - 1 positions before, or its chunk; None: everything."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True: queries and keys of each head are normalised before the rotation."""
    qk_norm_wide: bool = False
    """True: so are those of all heads together."""
    dtype: torch.dtype
    """Dtype of weights, activations and KV."""
    experts: ExpertConfig | None = None
    """Experts of the layers that have some."""
    latent: LatentConfig | None = None
    """Sizes of latent attention, which the cache sees as one KV head of `head_dim`; None: usual attention."""
    block: Block | None = None
    """Form of layers with LayerNorm and an MLP without a gate; None: Llama's."""
    states: StateLayers | None = None
    """Layers that have a recurrent state; None: there are none."""
    mixers: tuple[str, ...] = ()
    """Kind of each layer that has one part alone: "mamba", "attention", "mlp" or "experts"; (): all have two halves."""
    varied: VariedLayers | None = None
    """Properties of each layer if layers differ; `head_dim` and the like are then the first layer's."""
    chunked: ChunkedLayers | None = None
    """Properties of layers that see their chunk of positions alone, and of the others; None: windows slide."""
    gated_attention: bool = False
    """True: each head's result is multiplied by the sigmoid of a gate, which follows its query in the projection."""
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """This family's name for each of Llama's modules that it calls otherwise."""
    batch_invariant: bool = False
    """True: each result for a row is, bit for bit, independent of the other rows of its step. On a GPU not all models
    have such kernels (`batch_invariance.py`)."""

    quantization: Format | None = None
    """Format of the checkpoint's weights; None: they are not quantised."""
    layer_ropes: tuple[RopeConfig, ...] = ()
    """Rotation of each layer if they differ; (): all have `rope`."""
    norms: NormNames = PRE_NORMS
    state_norms: NormNames | None = None
    """Norms of layers with a recurrent state, which then have none of queries and keys; None: as the others."""
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Module of a layer for each other name that checkpoints have for it."""
    norm_offset: float = 0.0
    """Number that is added to the stored weights of norms."""
    hidden_act: str = "silu"
    """Activation of the MLP."""
    merged_qkv: bool = False
    """True: the checkpoint has one projection qkv_proj, which adapters target."""
    merged_gate_up: bool = False
    """True: the checkpoint has one projection gate_up_proj, which adapters target."""
    plain_mlp: bool = False
    """True: MLPs have no gate."""
    gate_scale: float = 1.0
    """Factor of the MLP's gate, before the activation."""
    mlp_scale: float = 1.0
    """Factor of the MLP's result."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings, after adapters."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    query_scaling: tuple[float, float] | None = None
    """Numbers b and n if a query at position p has the factor 1 + b · ln(1 + ⌊p / n⌋) (Llama 4); None: it has none."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """True: each head has a learned score of a key without a value."""
    attention_cap: float | None = None
    """Cap c of attention scores: a score x becomes c · tanh(x / c)."""
    logit_scale: float = 1.0
    """Factor of the logits, before the cap."""
    logit_cap: float | None = None
    """Cap of the logits."""
    folded_factors: bool = False
    """True: factors of the family are in the weights of a GGUF file, and those of an adapter are not known."""
    score: ScoreConfig | None = None
    """Labels of a classifier, which has no head of its own: its config ties the head, which is not computed."""

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """KV heads, and elements of a head, of each layer of the cache."""
        if self.varied is not None:
            return [(self.varied.kv_heads[index], self.varied.head_dims[index]) for index in self.varied.owners]
        return [(self.num_kv_heads, self.head_dim)] * len(self.attention_layers)

    def of_layer(self, index: int) -> DecoderConfig:
        """Config of one layer."""
        if self.state_norms is not None and self.states is not None and index in self.states.layers:
            return replace(self, norms=self.state_norms, qk_norm_wide=False)
        if (varied := self.varied) is None:
            return self
        return replace(
            self,
            num_kv_heads=varied.kv_heads[index],
            head_dim=varied.head_dims[index],
            intermediate_size=varied.inner_sizes[index],
        )

    @property
    def attention_layers(self) -> frozenset[int]:
        """Layers with attention."""
        if self.mixers:
            return frozenset(index for index, kind in enumerate(self.mixers) if kind == "attention")
        alone = self.states is not None and getattr(self.states, "attention_factors", None) is None
        return frozenset(range(self.num_layers)) - (self.states.layers if self.states and alone else frozenset())

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Distinct rotations of the layers."""
        return tuple(dict.fromkeys(self.layer_ropes)) or (self.rope,)

    @property
    def is_plain(self) -> bool:
        """True: embeddings, layers and head are computed as Llama's, but for norms of queries and keys."""
        factors = self.embedding_scale, self.residual_scale, self.logit_scale, self.gate_scale, self.mlp_scale
        scales = self.attention_scale, self.attention_cap, self.query_scaling, self.logit_cap
        others = self.block, self.experts, self.latent, *scales
        merged = self.merged_qkv or self.merged_gate_up or self.qk_norm_wide or self.sinks or bool(self.layer_ropes)
        merged = merged or self.plain_mlp or self.gated_attention or bool(self.names)
        merged = merged or any(kind is not None for kind in (self.states, self.varied, self.chunked))
        is_usual = self.norms == PRE_NORMS and self.norm_offset == 0.0 and self.hidden_act == "silu"
        whole = self.rope.rotary_dim is None and not self.rope.interleaved
        return is_usual and whole and not merged and set(factors) == {1.0} and others == (None,) * len(others)

    @property
    def embedding_size(self) -> int:
        """Elements of a token's embedding, and of a state that the head reads."""
        return (self.block and self.block.embedding_size) or self.hidden_size

    @property
    def sliding_window(self) -> Window:
        """The window when all layers have the same one; None when some layer sees everything."""
        distinct = set(self.windows)
        return distinct.pop() if len(distinct) == 1 else None


def named_architectures(raw: Mapping[str, Any]) -> list[str]:
    """Names in the `architectures` of a config.json; an absent list, or null, names none.

    Raises:
        UnsupportedModelError: it is no list of names.
    """
    named = raw.get("architectures")
    if named is None:
        return []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise wrong("architectures", f"must be a list of names, got {shown(named)}")
    return named


def stored_dtype(raw: Mapping[str, Any]) -> str:
    """Dtype that config.json names; "float32" when it names none.

    Raises:
        UnsupportedModelError: it is none of DTYPES.
    """
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}", param="dtype"
        )
    return name


def supported_architecture(raw: Mapping[str, Any]) -> str:
    """The first supported architecture that a HF config names.

    Raises:
        UnsupportedModelError: it names none, or its `architectures` are no list of names; the message lists the
            supported ones.
    """
    named = named_architectures(raw)
    for name in named:
        if find_traits(name) is not None:
            return name
    what = ", ".join(named) or f"none (model_type {raw.get('model_type')!r})"
    ours = ", ".join(supported_architectures())
    raise UnsupportedModelError(
        f"unsupported architecture: {what}; supported are {ours}; many other decoders of transformers run with "
        "model_impl auto or transformers",
        param="model",
    )


def config_from_hf(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """The config of a model that runs in `dtype`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture or one of its fields is not supported; `param` names the field.
    """
    architecture = supported_architecture(raw)
    check_values(raw)
    traits = find_traits(architecture)
    assert traits is not None, "`supported_architecture` found it"
    try:
        return decoder_config(raw, architecture, dtype, traits)
    except UnsupportedModelError as error:
        ours, theirs = error.param or "", traits.keys.get(error.param or "")
        if theirs is None or theirs not in raw:
            raise
        raise wrong(theirs, error.message.removeprefix(f"config.json: {ours} ")) from None


def decoder_config(
    raw: Mapping[str, Any], architecture: str, dtype: torch.dtype, traits: FamilyTraits
) -> DecoderConfig:
    """Config of a decoder from a HF config; a pure function.

    Raises:
        UnsupportedModelError: something this decoder does not do, or a wrong value; `param` names the field.
    """
    # A key with null counts as absent, but the family's default is for absent keys only: null means no window, and as
    # many KV heads as heads.
    renamed = {ours: raw[theirs] for ours, theirs in traits.keys.items() if theirs in raw}
    values = {key: value for key, value in {**traits.defaults, **raw, **renamed}.items() if value is not None}
    if traits.derived is not None:
        values |= traits.derived(values)
    block = None if traits.block is None else traits.block(values)
    _refuse_unsupported(values, traits)
    hidden_size = positive(values, "hidden_size")
    num_heads, num_layers = positive(values, "num_attention_heads"), positive(values, "num_hidden_layers")
    latent = read_latent(values) if traits.latent else None
    num_kv_heads, head_dim = (1, latent.key_dim) if latent else _kv_heads(values, num_heads, hidden_size, block)
    types = layer_types(values, num_layers, traits)
    learns_positions = block is not None and block.positions is not None
    no_rope = RopeConfig(rope_type="none", theta=1.0)
    rotated = latent.rope_dim if latent else head_dim
    ropes = (no_rope,) * num_layers if learns_positions else layer_ropes(values, rotated, types, traits)
    if latent is not None:
        ropes = tuple(replace(rope, rotary_dim=rotated) for rope in ropes)
    varied = None if traits.varied is None else traits.varied(values, types)
    if varied is not None and len(set(varied.head_dims)) > 1:
        ropes = tuple(replace(rope, head_dim=dim) for rope, dim in zip(ropes, varied.head_dims, strict=True))
    rope = next((r for r, kind in zip(ropes, types, strict=True) if kind == "full_attention"), ropes[0])
    from_file = bool(values.get("attention_bias", False))
    is_plain = traits.plain_mlp or (block is not None and block.mlp is not None)
    hidden_act = _activation(values, PLAIN_NAMES if is_plain else ACTIVATIONS, "hidden_activation" in traits.defaults)
    score = read_score(values) if architecture.endswith(CLASSIFIER) else None
    context = context_length(positive(values, "max_position_embeddings"), rope, traits)
    bound = positive(values, traits.context_bound) if traits.context_bound else context
    return DecoderConfig(
        architecture=architecture,
        vocab_size=positive(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(values, "intermediate_size", None if block is None else 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_extra_layers=values.get("num_nextn_predict_layers", 0),
        max_position_embeddings=min(context, bound),
        rms_norm_eps=number("rms_norm_eps", "", values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=score is not None or bool(values.get("tie_word_embeddings", False)),
        score=score,
        windows=layer_windows(values, types, traits),
        qkv_bias=from_file if traits.attention_bias is None else traits.attention_bias,
        o_bias=traits.attention_bias is None and bool(values.get(traits.o_bias or "", False)),
        mlp_bias=bool(values.get("mlp_bias", False)) if traits.mlp_bias is None else traits.mlp_bias,
        qk_norm=bool(values.get(traits.qk_norm)) if isinstance(traits.qk_norm, str) else traits.qk_norm,
        experts=read_experts(values, traits.experts, num_layers, hidden_act),
        dtype=dtype,
        latent=latent,
        block=block,
        states=None if traits.states is None else traits.states(values),
        query_scaling=query_scaling(values) if traits.scaled_queries else None,
        varied=varied,
        chunked=None if traits.chunked is None else traits.chunked(values),
        mixers=() if traits.mixers is None else traits.mixers(values),
        folded_factors=bool(values.get(FOLDED)),
        layer_ropes=ropes if len(set(ropes)) > 1 else (),
        hidden_act=hidden_act,
        quantization=None if _is_mxfp4(values, traits) else read_format(values),
        **{name: getattr(traits, name) for name in _OF_FAMILY},
        **_factors(values, hidden_size, dtype, traits, latent),
    )


def _kv_heads(values: Mapping[str, Any], num_heads: int, hidden_size: int, block: Block | None) -> tuple[int, int]:
    """Number of KV heads, and elements of a head."""
    num_kv_heads = (block and block.num_kv_heads) or positive(values, "num_key_value_heads", num_heads)
    head_dim = positive(values, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise wrong("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        raise wrong("head_dim", f"{head_dim} is odd, rotary embeddings need pairs")
    return num_kv_heads, head_dim


def _factors(
    values: Mapping[str, Any], hidden_size: int, dtype: torch.dtype, traits: FamilyTraits, latent: LatentConfig | None
) -> dict[str, Any]:
    """Factors and caps that a family has, by their fields in DecoderConfig."""
    found = {
        field: number(key, "", values[key]) ** exponent
        for field, (key, exponent) in traits.numbers.items()
        if key in values
    }
    if traits.scaled_embedding:
        found["embedding_scale"] = float(torch.tensor(hidden_size**0.5, dtype=dtype))
    if latent is not None:
        found["attention_scale"] = latent_scale(values, latent)
    return found


def _activation(values: Mapping[str, Any], served: Mapping[str, str], has_own_key: bool) -> str:
    """Activation of the MLP; some families have a key of their own, and an older one next to it."""
    field = "hidden_activation" if has_own_key and "hidden_activation" in values else "hidden_act"
    name = values.get(field, "silu")
    if not isinstance(name, str) or name not in served:
        raise wrong(field, f"{shown(name)} is not supported; supported are {', '.join(served)}")
    return served[name]


def _refuse_unsupported(values: Mapping[str, Any], traits: FamilyTraits) -> None:
    if values.get("use_bidirectional_attention"):
        raise wrong("use_bidirectional_attention", "is not supported: a text is generated from left to right")
    if "clip_qkv" in values:
        raise wrong("clip_qkv", f"({shown(values['clip_qkv'])}) is not supported")
    for key, served in traits.constants.items():
        if values.get(key, served) != served:
            raise wrong(key, f"({shown(values[key])}) is not supported; supported is {served:g}")


def _is_mxfp4(values: Mapping[str, Any], traits: FamilyTraits) -> bool:
    """True for experts stored as MXFP4, which the loader reads."""
    quantization = values.get("quantization_config")
    named = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    return named and traits.experts is not None and traits.experts.transposed
