"""Ranks of a divided decoder, as threads: their logits are those of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.checkpoint.loader import ModelOptions, load_model, read_facts
from outrider.models.config import DecoderConfig, config_from_hf
from outrider.models.model import LanguageModel
from outrider.models.parallel import rank_config
from outrider.platform.core.errors import InvalidRequestError

from ...thread_ranks import ThreadRanks, logits, on_ranks

SIZES = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 8, "vocab_size": 131, "max_position_embeddings": 64,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
FAMILIES = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"tie_word_embeddings": False},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Phi3ForCausalLM": {"tie_word_embeddings": False},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 8, "sliding_window": 4, "hidden_activation": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_all_ranks_are_those_of_one(tmp_path: Path, family: str, size: int) -> None:
    raw = {"architectures": [family], **SIZES, **FAMILIES[family]}
    if family == "LlamaForCausalLM" and size == 3:
        raw["num_key_value_heads"] = 1  # each rank has the only one
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def load(ranks: ThreadRanks | None) -> LanguageModel:
        return load_model(tmp_path, "float32", load_format="dummy", seed=3, options=ModelOptions("native", ranks=ranks))

    whole = logits(load(None))
    for found in on_ranks(size, lambda ranks: logits(load(ranks))):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_a_rank_with_the_share_of_another_is_seen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES}))

    def work(ranks: ThreadRanks) -> Tensor:
        number, ranks.rank = ranks.rank, 0
        model = load_model(tmp_path, "float32", load_format="dummy", options=ModelOptions("native", ranks=ranks))
        ranks.rank = number
        return logits(model)

    whole = logits(load_model(tmp_path, "float32", load_format="dummy"))
    assert (on_ranks(2, work)[0] - whole).abs().max() > 0.1, "the tolerance above is far below a wrong share"


def config(**changes: Any) -> DecoderConfig:
    return config_from_hf({"architectures": ["LlamaForCausalLM"], **SIZES, **changes}, torch.float32)


@pytest.mark.parametrize(
    ("size", "changes", "word"),
    [
        (5, {}, "num_attention_heads 12"),
        (12, {"intermediate_size": 90}, "intermediate_size 90"),
        (4, {}, "num_key_value_heads 6"),
        (12, {"vocab_size": 11}, "vocab_size 11"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(size: int, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"tensor_parallel_size {size} .*{word}") as caught:
        rank_config(config(**changes), size)
    assert caught.value.param == "tensor_parallel_size"


def test_facts_are_those_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES}))
    assert read_facts(tmp_path, num_ranks=3).kv_bytes_per_token * 3 == read_facts(tmp_path).kv_bytes_per_token
