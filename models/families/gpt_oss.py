"""OpenAI's gpt-oss: experts with biases and an activation of their own in every layer, a window in every other layer,
and a sink in each head's softmax. The experts are mostly stored as MXFP4."""

from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    mlp_bias=False,
    window_pattern=True,
    sinks=True,
    constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    experts=ExpertTraits(
        projections=("gate_up_proj", "down_proj"),
        intermediate_size="intermediate_size",
        renormalised=True,
        router="router",
        bias=True,
        transposed=True,
        activation="clamped_swiglu",
    ),
)
