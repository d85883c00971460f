"""A start that finds no memory: one line says what did not fit and what to lower. The sizes are beyond any address
space, so nothing is ever allocated."""

from __future__ import annotations

import json
import shutil

import pytest

from outrider import LLM
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError


def refused(match: str, model: str | None = None, **options) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        LLM(model, speculative_config=None, enable_lora=False, **options)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


def test_weights(tmp_path):
    shutil.copytree(demo_model_path(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"vocab_size": 1 << 24, "hidden_size": 1 << 24}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    message = r"^no memory for the model's weights: a smaller model.*--quantization.*allocate"
    refused(message, str(tmp_path / "model"), load_format="dummy", max_model_len=256, num_gpu_blocks_override=128)


def test_kv_cache():
    refused("^no memory for the KV cache: lower gpu_memory_utilization", num_gpu_blocks_override=1 << 34)
