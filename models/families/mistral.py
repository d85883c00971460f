"""Mistral: Llama without biases; every layer has the sliding window, unless the file says null."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={"vocab_size": 32000, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    attention_bias=False,
    mlp_bias=False,
    plain_tokenizer_type="mistral",
)
