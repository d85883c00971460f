"""Ministral 3: Mistral with a YaRN rotation, and queries that grow with their position."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    },
    attention_bias=False,
    mlp_bias=False,
    scaled_queries=True,
    plain_tokenizer_type="ministral3",
)
