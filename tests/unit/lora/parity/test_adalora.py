"""AdaLoRA beyond its fields (`test_kind_fields.py`): ranks that PEFT's own training has pruned."""

import json

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from safetensors.torch import load_file

from .reference import ALL, VOCAB, Engine, load_base, peft_logits, save_base

pytestmark = pytest.mark.slow

STEPS = 8


def test_ranks_that_training_has_pruned(tmp_path):
    base = save_base(tmp_path / "base", "Llama", False)
    schedule = {"total_step": STEPS, "tinit": 1, "tfinal": 2, "target_r": 2}
    model = get_peft_model(load_base(base), AdaLoraConfig(init_r=5, lora_alpha=20, target_modules=ALL, **schedule))
    optimizer = torch.optim.Adam((one for one in model.parameters() if one.requires_grad), lr=0.2)
    tokens = torch.randint(3, VOCAB, (2, 12))
    for step in range(STEPS + 1):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "x")
    ranks = {len(t) for k, t in load_file(tmp_path / "x" / "adapter_model.safetensors").items() if "lora_E" in k}
    assert len(ranks) > 1
    assert json.loads((tmp_path / "x" / "adapter_config.json").read_text())["rank_pattern"]
    prompt = tokens[0].tolist()
    engine = Engine(base, {"x": str(tmp_path / "x")}, {"x": prompt})
    engine.admit(["x"])
    expected = peft_logits(base, tmp_path / "x", prompt)
    torch.testing.assert_close(engine.run(["x"])["x"], expected, atol=1e-4, rtol=1e-4)
    engine.close()
    assert (expected - peft_logits(base, None, prompt)).abs().max() > 0.05
