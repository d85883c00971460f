"""Configs of models that run through transformers' code: context lengths, and absurd sizes."""

from types import SimpleNamespace

import pytest
import torch

from outrider.models.transformers_model.config import context_length, transformers_config
from outrider.platform.core.errors import UnsupportedModelError


@pytest.mark.parametrize("positions", [1 << 30, 1 << 40])
def test_a_table_of_absurd_length_is_refused_by_the_name_of_its_field(positions):
    """GPT-J computes a table of all positions when it is made: a bare memory error came out of it."""
    raw = {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 48, "n_head": 4, "n_layer": 1}
    with pytest.raises(UnsupportedModelError, match="n_positions makes a table of"):
        transformers_config({**raw, "rotary_dim": 8, "n_positions": positions, "vocab_size": 131}, torch.float32)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", None])
def test_longrope_of_one_layer_type_bounds_the_context(kind):
    """All rows of a pass are turned alike here, so no prompt may reach beyond the short context."""
    plain, long = {"rope_type": "default"}, {"rope_type": "longrope", "original_max_position_embeddings": 64}
    ropes = {"full_attention": plain, "sliding_attention": plain}
    turned = long if kind is None else {**ropes, kind: long}
    assert context_length("X", SimpleNamespace(max_position_embeddings=256, rope_parameters=turned)) == 64
    assert context_length("X", SimpleNamespace(max_position_embeddings=256, rope_parameters=ropes)) == 256
