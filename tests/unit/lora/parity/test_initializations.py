"""Adapters of all initializations of PEFT: those that change the base weights are served once PEFT has converted them
to plain LoRA, and refused by name as they are; the others are plain LoRA."""

import dataclasses
import json
import sys

import pytest
import torch
from peft import EvaConfig, LoftQConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.loraga import preprocess_loraga

from outrider.platform.core.errors import AdapterError

from .reference import VOCAB, Engine, load_base, peft_logits, save_base

TARGETS = ["q_proj", "down_proj"]
BATCHES = [{"input_ids": torch.arange(3, 67).reshape(4, 16) % VOCAB + i} for i in range(2)]
CONVERTED = ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"]
PLAIN = ["gaussian", "orthogonal", "eva", "mica"]


def options(kind):
    more = {
        "corda": {"corda_config": CordaConfig(corda_method="kpm")},
        "eva": {"eva_config": EvaConfig()},
        "loftq": {"loftq_config": LoftQConfig(loftq_bits=8)},
        "lora_ga": {"lora_ga_config": LoraGAConfig()},
    }
    return {"r": 4, "lora_alpha": 4, "target_modules": TARGETS, "init_lora_weights": kind, **more.get(kind, {})}


def initialized(base, kind):
    """The PEFT model before training, as the documentation of each initialization says."""
    torch.manual_seed(1)
    model, config = load_base(base), LoraConfig(**options(kind))
    if kind == "corda":
        # PEFT imports `attr`, which it does not require, for its `dataclass` alone.
        sys.modules.setdefault("attr", dataclasses)
        from peft.tuners.lora.corda import preprocess_corda

        preprocess_corda(
            model, config, run_model=lambda: [model(batch["input_ids"].reshape(1, -1)) for batch in BATCHES]
        )
    elif kind == "lora_ga":
        preprocess_loraga(
            model, config, lambda: [model(**batch, labels=batch["input_ids"]).loss.backward() for batch in BATCHES]
        )
    model = get_peft_model(model, config)
    if kind == "eva":
        initialize_lora_eva_weights(model, BATCHES)
    return model


def trained(base, kind, folder):
    """Train and save an adapter as it is and, if the base weights have changed, converted. Returns the model and
    the folder that is served."""
    model = initialized(base, kind)
    config = model.peft_config["default"]
    converts = kind in CONVERTED
    if converts:
        config.init_lora_weights = True
        model.save_pretrained(folder / "initial")
        config.init_lora_weights = kind
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder / "raw")
    if converts:
        model.save_pretrained(folder / "served", path_initial_model_for_weight_conversion=str(folder / "initial"))
    return model.eval(), str(folder / ("served" if converts else "raw"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), "Llama", False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CONVERTED, *PLAIN])
def test_logits_are_those_of_the_trained_model(base, tmp_path, kind):
    """The model that was trained, whose base may have changed, PEFT on the plain base, and the engine agree."""
    prompt = [3, 5, 9, 11, 7, 20]
    model, path = trained(base, kind, tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(peft_logits(base, path, prompt), expected, rtol=1e-3, atol=1e-3)
    engine = Engine(base, {"one": path}, {"one": prompt})
    engine.admit(["one"])
    torch.testing.assert_close(engine.run(["one"])["one"], expected, rtol=1e-3, atol=1e-3)
    engine.close()
    assert (expected - peft_logits(base, None, prompt)).abs().max() > 0.1


@pytest.mark.parametrize("kind", [*CONVERTED, "loftq"])
def test_those_that_changed_the_base_are_refused_by_name(base, tmp_path, kind):
    """Their base is another one; if the field is in the file, the error names it and the way to convert."""
    config = LoraConfig(**options(kind))
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] == kind
    engine = Engine(base, {"one": str(tmp_path)}, {"one": [3]})
    with pytest.raises(AdapterError, match=f"init_lora_weights='{kind}'.*path_initial_model_for_weight_conversion"):
        engine.admit(["one"])
    engine.close()
