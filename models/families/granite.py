"""Granite: Llama with factors of embeddings, scores, residuals and logits."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={"vocab_size": 32000, "max_position_embeddings": 2048, "attention_multiplier": 1.0},
    numbers={
        "embedding_scale": ("embedding_multiplier", 1.0),
        "residual_scale": ("residual_multiplier", 1.0),
        "attention_scale": ("attention_multiplier", 1.0),
        "logit_scale": ("logits_scaling", -1.0),
    },
    has_window=False,
)
