"""Description of an engine in the start-up summary."""

import json

import pytest

from outrider.platform.core.config import EngineArgs
from outrider.platform.engine import description
from outrider.platform.engine.engine_core import EngineCore

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 2},
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 70, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}


@pytest.mark.parametrize(("tiles", "line"), [("not used", "not used; products: oneDNN's in 9 linear layers"), ("", "")])
def test_description_of_products_with_tiles(tmp_path, monkeypatch, tiles, line):
    """Each linear layer and the head are counted; float32 has no product of ours. Without tiles there is no line."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(description.tiles, "describe", lambda: tiles)
    engine = EngineCore(EngineArgs(model=str(tmp_path), load_format="dummy", dtype="float32", max_model_len=64))
    assert engine.info.tiles == line
    engine.shutdown()
