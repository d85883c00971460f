"""Qwen3.5, text: gated delta nets, with gated attention in each fourth layer."""

from functools import partial

from .prediction import PredictionHead
from .state_layers import delta_net
from .traits import FamilyTraits

DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

PREDICTION = PredictionHead(
    layer="mtp.layers.{head}",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    norm_output=True,
)

TRAITS = FamilyTraits(
    defaults=DEFAULTS,
    constants={"attn_output_gate": True},
    mlp_bias=False,
    qk_norm=True,
    norm_offset=1.0,
    partial_rotary=True,
    has_window=False,
    gated_attention=True,
    states=partial(delta_net, merged=False),
    prediction=PREDICTION,
)
