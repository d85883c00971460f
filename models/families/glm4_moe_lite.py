"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and a list of the layers with experts."""

from dataclasses import replace

from . import deepseek_v3

TRAITS = replace(
    deepseek_v3.TRAITS,
    defaults={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "num_experts": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
