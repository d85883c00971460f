"""MiMo (7B): Qwen2's layers."""

from dataclasses import replace

from . import qwen2
from .prediction import PredictionHead

_LAYER = "model.mtp_layers.{head}"
TRAITS = replace(
    qwen2.TRAITS,
    prediction=PredictionHead(
        layer=_LAYER,
        token_norm=f"{_LAYER}.token_layernorm",
        hidden_norm=f"{_LAYER}.hidden_layernorm",
        projection=f"{_LAYER}.input_proj",
        norm=f"{_LAYER}.final_layernorm",
        hidden_first=True,
        norm_output=True,
    ),
)
