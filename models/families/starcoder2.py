"""Starcoder2: Llama's names, with LayerNorm, biases and an MLP without a gate."""

from .block import Block
from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 49152,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    keys={"attention_bias": "use_bias", "mlp_bias": "use_bias", "rms_norm_eps": "norm_epsilon"},
    block=lambda values: Block(mlp=("mlp.c_fc", "mlp.c_proj")),
)
