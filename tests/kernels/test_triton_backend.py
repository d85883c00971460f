"""The Triton backend of attention in a model of which it is the default."""

import pytest
import torch
import transformers

pytest.importorskip("triton")

from outrider.models import decoder
from outrider.models.attention import AttentionSpec, best_backend, grouped
from outrider.models.attention.torch import InvariantAttention, TorchAttention
from outrider.models.attention.triton import TritonAttention, TritonInvariantAttention
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.config import DecoderConfig, config_from_hf
from outrider.models.rope_config import RopeConfig

from ..tiny_families import FAMILIES, SIZES


def test_the_backend_of_a_gpu() -> None:
    spec = AttentionSpec(8, 2, 64, frozenset({None}), torch.bfloat16, torch.device("cuda"))
    assert best_backend(spec) is TritonAttention
    assert best_backend(spec, batch_invariant=True) is TritonInvariantAttention
    for dim, dtype in ((512, torch.bfloat16), (64, torch.float64)):
        unserved = AttentionSpec(8, 2, dim, frozenset({None}), dtype, torch.device("cuda"))
        assert best_backend(unserved) is TorchAttention
        assert best_backend(unserved, batch_invariant=True) is InvariantAttention


def test_a_model_gives_the_logits_of_the_torch_backend(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(
        **{"architecture": "LlamaForCausalLM", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80},
        **{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 20, "max_position_embeddings": 256},
        **{"rms_norm_eps": 1e-6, "rope": RopeConfig(rope_type="default", theta=1e4), "tie_word_embeddings": True},
        **{"windows": (None, 9), "qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": True},
        dtype=torch.float32,
    )
    check(config, device, monkeypatch)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek3"])
def test_sinks_and_latents(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    raw = getattr(transformers, f"{family.prefix}Config")(**{**SIZES, **family.config}).to_dict()
    check(config_from_hf({**raw, "architectures": [f"{family.prefix}ForCausalLM"]}, torch.float32), device, monkeypatch)


def check(config: DecoderConfig, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, then in one step a chunk that continues one, a decode, a verification, with both backends. With Triton's
    norms add the residual stream, as on a GPU."""
    tables = [[3, 9, 1], [0, 7], [5]]
    steps = [
        SequenceRows(list(range(60)), [30, 20, 10], [0, 0, 0], tables),
        SequenceRows(list(range(60, 76)), [12, 1, 3], [30, 20, 10], tables),
    ]
    results = []
    for backend in (TorchAttention, TritonAttention):
        monkeypatch.setattr(decoder, "adds_residuals", lambda device, backend=backend: backend is TritonAttention)
        monkeypatch.setattr(grouped, "make_attention", lambda spec, *, batch_invariant, backend=backend: backend(spec))
        model = decoder.Decoder(config, device)
        for index, slot in enumerate(model.weight_slots().values()):
            generator = torch.Generator().manual_seed(index)
            slot.load(torch.randn(slot.shape, generator=generator) * slot.shape[-1] ** -0.5)
        kv = allocate_kv(model.kv_layers, 10, 16, torch.float32, device)
        hidden = [model.forward(build_batch(rows, model, kv)).hidden for rows in steps]
        results.append(model.compute_logits(torch.cat(hidden)))
    assert results[0].std() > 0.1
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
