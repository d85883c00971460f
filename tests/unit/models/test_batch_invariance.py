"""Models that a GPU computes with batch-invariant kernels, and those that are refused there by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from outrider.models import batch_invariance
from outrider.models.batch_invariance import check_batch_invariance
from outrider.models.config import DecoderConfig, config_from_hf
from outrider.models.decoder import Decoder
from outrider.platform.core.errors import InvalidRequestError

from ...tiny_families import FAMILIES, SIZES

GPU = torch.device("cuda")


def make_config(name: str, **changed: object) -> DecoderConfig:
    family = FAMILIES[name]
    raw = getattr(transformers, f"{family.prefix}Config")(**{**SIZES, **family.config}).to_dict()
    config = config_from_hf({**raw, "architectures": [f"{family.prefix}ForCausalLM"]}, torch.bfloat16)
    return replace(config, batch_invariant=True, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_gpu_serves_it(name: str) -> None:
    pytest.importorskip("triton")
    check_batch_invariance(make_config(name), GPU)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("mixtral", {}, "experts"),
        ("deepseek3", {"experts": None}, "latent attention"),
        ("opt", {}, "LayerNorm"),
        ("llama", {"head_dim": 264}, "such heads"),
    ],
)
def test_a_gpu_refuses_it(name: str, changed: dict[str, object], reason: str) -> None:
    """Before any memory of the GPU is taken."""
    pytest.importorskip("triton")
    config = make_config(name, **changed)
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        Decoder(config, GPU)
    assert caught.value.param == "batch_invariant"
    assert config.architecture in str(caught.value)
    check_batch_invariance(config, torch.device("cpu"))
    check_batch_invariance(replace(config, batch_invariant=False), GPU)


def test_without_triton_nothing_is_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "has_triton", lambda: False)
    with pytest.raises(InvalidRequestError, match="without Triton"):
        check_batch_invariance(make_config("llama"), GPU)
