"""Traits by which model families differ. The module imports no torch, because the API process reads tokenizers too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .block import Block
from .chunked_layers import ChunkedLayers
from .prediction import PredictionHead
from .state_layers import StateLayers
from .varied_layers import VariedLayers


class NormNames(NamedTuple):
    """Names of a layer's norms in the checkpoint; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Norm of what attention adds to the residual stream."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    """Norm of what the MLP adds to the residual stream."""


PRE_NORMS = NormNames()
"""Norms of Llama."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """Properties of a family whose layers have experts (Shazeer et al. 2017): keys of its config.json, and names of its
    tensors in a checkpoint in which each expert has its own."""

    block: str = "mlp"
    """Module of a layer that holds the router `gate` and the experts."""
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Projections of an expert: gate and up, or one of both, and down."""
    intermediate_size: str = "moe_intermediate_size"
    """Key of an expert's inner size."""
    renormalised: bool | None = None
    """True: the weights of a token's experts sum to 1; None: the file's `norm_topk_prob` decides."""
    rounded: bool = True
    """True: these weights are rounded to the model's dtype."""
    gated: bool = True
    """False: an expert has no gate."""
    shared: bool = False
    """True: each token has a shared expert too, with a gate of its own."""
    shared_size: str | None = None
    """Key of the inner size of a shared expert without a gate; None: there is none, or `n_shared_experts` says."""
    shared_module: str | None = None
    """Module of that expert in the layer; None: in the block, by its usual name."""
    shared_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    merged_names: Mapping[str, str] = field(default_factory=dict)
    """Names in a block of a checkpoint for those of transformers: of the router, and of tensors of all experts."""
    ungated: bool = False
    """True: each token has `n_shared_experts` shared experts too, without gates."""
    ungated_name: str = "shared_experts"
    """Module of these in the block."""
    scaled_inputs: bool = False
    """True: a token visits the experts of its largest logits with its state times their sigmoids, and the results are
    added as they are (Llama 4)."""
    merged_block: str = "mlp"
    """Module of a layer that holds the tensors of all experts, if they are merged."""
    grouped: bool = False
    """True: experts are chosen from the best of `n_group` groups, unless `topk_method` is "greedy", and their weights
    have the factor `routed_scaling_factor`."""
    sigmoid: bool = False
    """True: scores are sigmoids of the router's outputs; False: their softmax."""
    correction: str | None = None
    """Tensor in the block that is added to the scores for the choice (DeepSeek-V3); None: there is none."""
    correction_switch: str | None = None
    """Key that is false in files without that tensor; None: all have it."""
    correction_row: bool = False
    """True: it is stored as [1, E]."""
    float_router: bool = False
    """True: the router is computed in float32."""
    router: str = "gate"
    """Module of the router in the block."""
    bias: bool = False
    """True: router and experts have biases."""
    transposed: bool = False
    """True: the tensors of all experts are [E, in, out], gate and up in one product; they may be stored as MXFP4."""
    activation: str | None = None
    """Activation of an expert; None: that of all MLPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Properties of a family: values of keys that its config.json may leave out, and facts that no file states."""

    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    """Key of this family's config.json for each of Llama's keys that it calls otherwise."""
    block: Callable[[Mapping[str, Any]], Block] | None = None
    """Function from the values of a config.json to the layers' form; None: Llama's."""
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Function from these values to those that follow from others."""
    names: Mapping[str, str] = field(default_factory=dict)
    """See `DecoderConfig`."""
    states: Callable[[Mapping[str, Any]], StateLayers | None] | None = None
    """Function from the values to the layers with a recurrent state; None: no layer has one."""
    mixers: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    """Function from the values to the kind of each layer, of which it is all; None: layers have two halves."""
    varied: Callable[[Mapping[str, Any], Sequence[str]], VariedLayers] | None = None
    """Function from the values and the layers' kinds of attention to what layers differ in; None: all are alike."""
    chunked: Callable[[Mapping[str, Any]], ChunkedLayers] | None = None
    """Function from the values to what layers with chunks, and those without, do otherwise; None: windows slide."""
    gated_attention: bool = False
    """See `DecoderConfig`."""
    attention_bias: bool | None = None
    """Bias of q, k and v; None: the file's `attention_bias` decides, for o too."""
    o_bias: str | None = "attention_bias"
    """Key that decides about the bias of o if `attention_bias` is None; None: o has none."""
    mlp_bias: bool | None = None
    """Bias of the MLP; None: the file's `mlp_bias` decides."""
    qk_norm: bool | str = False
    """See `DecoderConfig`; a text is the key that decides."""
    qk_norm_wide: bool = False
    """See `DecoderConfig`, as for the next seven."""
    norms: NormNames = PRE_NORMS
    state_norms: NormNames | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    merged_qkv: bool = False
    merged_gate_up: bool = False
    plain_mlp: bool = False
    scaled_embedding: bool = False
    """True: token embeddings have the factor sqrt(hidden_size), in the model's dtype."""
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Field of `DecoderConfig` -> key of config.json, and the power of its number which the field is."""
    window_switch: bool = False
    """True: a window counts only with `use_sliding_window`, and only from layer `max_window_layers` on."""
    window_everywhere: bool = False
    """True: with `use_sliding_window` every layer has it, whatever else the file says."""
    window_pattern: bool = False
    """True: layers have a window by the file's `layer_types`, or all but every `sliding_window_pattern`-th."""
    has_window: bool = True
    local_rope: bool = False
    """True: layers with a window have a rotation of their own."""
    window_rope: bool = False
    """True: if the model has a window, layers without one have no rotation."""
    no_rope: bool = False
    """True: some layers have no rotation, by `no_rope_layers` or each `no_rope_layer_interval`-th."""
    partial_rotary: bool = False
    """True: the file's `partial_rotary_factor` counts."""
    interleaved_rope: bool = False
    """True: neighbours are rotated as pairs."""
    scaled_queries: bool = False
    """True: `llama_4_scaling_beta` of the rotation counts."""
    sinks: bool = False
    """See `DecoderConfig`."""
    latent: bool = False
    """True: attention is latent (DeepSeek-V2)."""
    context_bound: str | None = None
    """Key of the most tokens that are served; None: there is no such bound."""
    unused: str | None = None
    """Pattern in the names of tensors that are not loaded; None: there are none."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Keys of config.json of which one number is served."""
    experts: ExpertTraits | None = None
    """None: all layers have a dense MLP."""
    prediction: PredictionHead | None = None
    """Heads for multi-token prediction that its checkpoints may have; None: none are served."""
    plain_tokenizer_type: str | None = None
    """Value of `model_type` in config.json of models whose tokenizer.json holds the whole tokenizer. None: transformers
    chooses the tokenizer's class."""
