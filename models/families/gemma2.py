"""Gemma 2: scaled embeddings, GeGLU, norms before and after attention and MLP whose weights are stored less one, soft
caps of scores and logits, and a window in every other layer."""

from .traits import FamilyTraits, NormNames

NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
NUMBERS = {
    "attention_scale": ("query_pre_attn_scalar", -0.5),
    "attention_cap": ("attn_logit_softcapping", 1.0),
    "logit_cap": ("final_logit_softcapping", 1.0),
}

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 256000,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    mlp_bias=False,
    norms=NORMS,
    norm_offset=1.0,
    scaled_embedding=True,
    numbers=NUMBERS,
    window_pattern=True,
)
