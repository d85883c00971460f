"""Llama (2, 3, 3.1 with its rope scaling) and models saved in its shape."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={"vocab_size": 32000, "max_position_embeddings": 2048},
    has_window=False,
    plain_tokenizer_type="llama",
)
