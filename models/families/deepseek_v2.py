"""DeepSeek-V2: latent attention, and from some layer on experts in groups, and some that every token visits."""

from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    keys={"num_experts": "n_routed_experts"},
    has_window=False,
    interleaved_rope=True,
    mlp_bias=False,
    latent=True,
    constants={"norm_topk_prob": 0, "moe_layer_freq": 1},
    experts=ExpertTraits(renormalised=False, rounded=False, ungated=True, grouped=True, float_router=True),
)
