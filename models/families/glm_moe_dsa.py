"""GLM-5: GLM-4.7-Flash with the sparse attention of DeepSeek-V3.2, served within as many tokens."""

from dataclasses import replace

from . import deepseek_v32

TRAITS = replace(
    deepseek_v32.TRAITS,
    defaults={
        **deepseek_v32.TRAITS.defaults,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
    },
)
