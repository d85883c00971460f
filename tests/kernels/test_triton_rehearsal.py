"""The first users' requests launch only kernels that the rehearsal has launched: none is compiled while they wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams
from outrider.kernels import act_and_mul as kernels_act_and_mul
from outrider.kernels import linear as linear_products
from outrider.kernels import rms_norm as kernels_rms_norm
from outrider.kernels.linear import device_few
from outrider.kernels.linear import torch as linear_torch
from outrider.kernels.quantized_linear import QuantizedWeight
from outrider.kernels.quantized_linear.device_linear import TritonQuantizedLinear
from outrider.kernels.rms_norm.triton import _rms_norm_kernel as rms_norm_kernel
from outrider.lora.device import arena, batching, vectors
from outrider.models import attention, decoder
from outrider.models.attention.triton import TritonAttention
from outrider.models.decoder import Decoder
from outrider.models.layers import linear
from outrider.platform.core.config import EngineArgs
from outrider.platform.engine import setup
from outrider.platform.engine.runner import rehearsal
from outrider.platform.engine.runner.rehearsal import rehearse_adapter, rehearse_prompts
from outrider.platform.engine.runner.warm_up import dummy, step

from .compile_keys import recorded_keys
from .test_graphs_engine import VOCAB, write_adapter, write_model


def pack_quantized(blocks, bias, dtype, batch_invariant):
    """Weights rounded to int8; their numbers do not matter here."""
    forms = [
        QuantizedWeight(bits=8, codes=block.to(torch.int8), scales=torch.ones(len(block), 1), group=block.shape[1])
        for block in blocks
    ]
    packed = TritonQuantizedLinear(forms, bias, dtype, batch_invariant=batch_invariant)
    return packed, torch.zeros(packed.out_features)


@pytest.mark.parametrize("product", ["product_kernel", "few_rows_kernel"])
def test_nothing_is_left_to_compile_for_prompts_and_adapters(
    product: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With quantised weights, and with plain ones whose products of few tokens are ours: after the rehearsal requests
    with adapters of other ranks, long prompts and steps of other sizes launch no kernel that Triton would compile."""
    if device == "cuda":
        pytest.skip("the rehearsal has happened when the engine is there")
    for module in (arena, batching, vectors):
        monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)
    monkeypatch.setattr(attention, "best_backend", lambda spec, *, batch_invariant: TritonAttention)
    monkeypatch.setattr(kernels_rms_norm, "use_triton", lambda x: True)
    if product == "product_kernel":
        monkeypatch.setattr(linear, "pack_weights", pack_quantized)
    monkeypatch.setattr(linear_products, "is_native", lambda weight: False)
    monkeypatch.setattr(linear_torch, "_prepacks", lambda weight: False)
    monkeypatch.setattr(linear_products, "use_triton", lambda x: True)
    monkeypatch.setattr(device_few, "tried_rows", lambda weight: 16)
    monkeypatch.setattr(decoder, "adds_residuals", lambda device: True)
    monkeypatch.setattr(kernels_act_and_mul, "use_triton", lambda x: True)
    monkeypatch.setattr(rehearsal, "LENGTHS", (20,))
    vocab = torch.zeros(1, VOCAB)  # launches are noted and nothing is computed
    monkeypatch.setattr(Decoder, "compute_logits", lambda model, hidden, *_, **__: vocab.repeat(len(hidden), 1))
    parts = setup.build(
        EngineArgs(
            model=str(write_model(tmp_path / "target", 2)), device="cpu", dtype="float32", load_format="dummy",
            max_model_len=128,
            max_num_seqs=4, num_gpu_blocks_override=60, enable_lora=True, max_loras=3, max_lora_rank=20, seed=0,
        )
    )  # fmt: skip
    folders = {
        "narrow": write_adapter(tmp_path / "narrow", 3, 1, ["q_proj", "down_proj"]),
        "wide": write_adapter(tmp_path / "wide", 17, 1, ["q_proj", "v_proj"], head=True),
    }
    scheduler, runner, adapters = parts.scheduler, parts.runner, parts.adapters
    loaded = [adapters.catalog.load(LoRARequest(name, path=folders[name]), pinned=True).name for name in folders]
    with recorded_keys() as rehearsed:
        rehearse_prompts(scheduler, runner)
        rehearse_adapter(scheduler, runner, adapters, runner._model, ("", ()))
    kernels = {"shrink_kernel", "expand_kernel", "attention_kernel", "_rms_norm_kernel", product}
    assert kernels <= rehearsed.keys()
    adds_residual = rms_norm_kernel.arg_names.index("HAS_RESIDUAL") - rms_norm_kernel.arg_names.index("WIDTH")
    assert any(key.constants[adds_residual] for key in rehearsed["_rms_norm_kernel"])
    assert [info.name for info in adapters.catalog.list()] == loaded
    assert not scheduler.has_work()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
    with recorded_keys() as launched:
        for number, (name, length) in enumerate([("narrow", 30), ("wide", 3), (None, 18)]):
            request = dummy(str(number), number, params, length)
            request.lora = LoRARequest(name, path=folders[name]) if name else None
            adapters.resolve(request)
            scheduler.add(request)
            step(scheduler, runner)
        while scheduler.has_work():
            step(scheduler, runner)
    most = 4 if product == "product_kernel" else 6  # two sites have norms before them
    assert len(rehearsed["shrink_kernel"]) <= most  # by the inputs and slices of a site
    for name, keys in launched.items():
        assert keys <= rehearsed[name], (name, keys - rehearsed[name])
