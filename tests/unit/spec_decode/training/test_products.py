"""Products of a run in bfloat16 on processors that compute float32 faster."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from outrider.platform.core.errors import InvalidRequestError
from outrider.spec_decode.training import run as run_module
from outrider.spec_decode.training.data import collate
from outrider.spec_decode.training.run import train_draft
from outrider.spec_decode.training.target import load_target

from .conftest import CPU


@pytest.mark.parametrize("adapter", [None, "adapter"])
def test_a_target_in_bfloat16_computes_in_float32(folders, samples, adapter):
    """Its states are those of the same weights in float32, rounded once, and so are its logits."""
    adapter, layers = adapter and folders.adapter, (1, 3)
    target = load_target(folders.target, adapter, torch.bfloat16, CPU, layers)
    expected = load_target(folders.target, adapter, torch.bfloat16, CPU, layers)
    expected._causal.float()
    target.compute_in_float32()
    batch, tokens = collate(samples[:3], CPU), torch.tensor([7, 300, 1999])
    found, wanted = target.features(batch), expected.features(batch)
    for a, b in zip((found.hidden, *found.aux), (wanted.hidden, *wanted.aux), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.allclose(a.float(), b.float(), atol=1e-2, rtol=1e-2)
    states = found.labels.states
    logits = found.head.logits(states)
    assert torch.allclose(logits, states.float() @ target.lm_head.float().T, atol=1e-5)
    assert torch.allclose(found.head.logits(states, tokens), logits[:, tokens], atol=1e-5)


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_a_resumed_run_keeps_its_products(options, samples, tmp_path, monkeypatch, products):
    """Whatever a trial would now prefer."""
    monkeypatch.setattr(run_module, "product_dtype", lambda *args: products)
    whole = options(dtype="bfloat16", output=str(tmp_path / "whole"))
    parts = dataclasses.replace(whole, output=str(tmp_path / "parts"), save_minutes=0.0)
    (tmp_path / "parts").mkdir()
    train_draft(whole, samples[8:], samples[:8])

    def kill(line):
        if line.startswith("step 3/"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train_draft(parts, samples[8:], samples[:8], report=kill)
    other = torch.bfloat16 if products == torch.float32 else torch.float32
    monkeypatch.setattr(run_module, "product_dtype", lambda *args: other)
    train_draft(dataclasses.replace(parts, resume=True), samples[8:], samples[:8])
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_a_broken_checkpoint_has_no_products(options, samples, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.pt").write_bytes(b"nothing")
    with pytest.raises(InvalidRequestError, match="is no checkpoint"):
        train_draft(options(resume=True, dtype="bfloat16"), samples[8:], samples[:8])
