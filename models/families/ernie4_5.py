"""ERNIE 4.5: Llama with neighbours rotated as pairs."""

from .prediction import PredictionHead
from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 103424,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    has_window=False,
    interleaved_rope=True,
    prediction=PredictionHead(
        layer="model.mtp_block.{head}",
        token_norm="model.mtp_emb_norm.{head}",
        hidden_norm="model.mtp_hidden_norm.{head}",
        projection="model.mtp_linear_proj.{head}",
        norm="model.norm",
    ),
)
