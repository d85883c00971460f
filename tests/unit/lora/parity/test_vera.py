"""VeRA adapters: PEFT's logits for every field of its VeraConfig, or a refusal that names the field."""

import dataclasses
import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outrider.lora.files.peft_fields import FIELDS, SHARED_FIELDS, VERA_FIELDS, fields_table
from outrider.platform.core.errors import AdapterError

from .reference import ALL, CONFIG, VOCAB, Engine, peft_logits, save_base, train, train_vera

pytestmark = pytest.mark.slow

PLAIN = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
# Options in addition to `PLAIN`, by name of the case: the field, and a letter if it has several.
SERVED = {
    "r": {"r": 7},
    "task_type": {"task_type": "CAUSAL_LM"},
    "auto_mapping": {"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}},
    "peft_version": {"peft_version": "0.1"},
    "base_model_name_or_path": {"base_model_name_or_path": "somebody/something"},
    "revision": {"revision": "main"},
    "inference_mode": {"inference_mode": False},
    "target_modules a": {"target_modules": "all-linear"},
    "target_modules b": {"target_modules": ["lm_head", *ALL]},
    "target_modules c": {"target_modules": r".*\.1\.mlp\.up_proj"},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "bias a": {"bias": "all"},
    "bias b": {"bias": "vera_only"},
    "projection_prng_key": {},
    "vera_dropout": {"vera_dropout": 0.1},
    "d_initial": {"d_initial": 0.5},
    "init_weights": {"init_weights": False},
}
# Values written into a plain adapter's file.
REFUSED = {"save_projection": False, "bias": "some", "peft_type": "IA3", "modules_to_save": ["mlp"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("vera") / "base", "Qwen2", False)


def write_config(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_tables_have_every_field_of_peft_and_every_field_is_driven():
    fields = {field.name for field in dataclasses.fields(peft.VeraConfig)}
    assert {*SHARED_FIELDS, *VERA_FIELDS} == fields
    assert {name.split()[0] for name in (*SERVED, *REFUSED)} == fields
    rules = {name: FIELDS[name] for name in SHARED_FIELDS} | VERA_FIELDS
    assert set(REFUSED) == {name for name, rule in rules.items() if rule.refused}


def test_served_values_give_the_logits_of_peft(base, tmp_path):
    paths = {name.replace(" ", "_"): str(tmp_path / name.replace(" ", "_")) for name in SERVED}
    for seed, (name, options) in enumerate(SERVED.items()):
        train_vera(base, seed, **PLAIN | options).save_pretrained(paths[name.replace(" ", "_")])
    prompts = {name: torch.randint(3, VOCAB, (9,)).tolist() for name in ("base", *paths)}
    engine = Engine(base, paths, prompts, max_loras=len(prompts))
    engine.admit(prompts)
    got = engine.run(prompts, (5, 2))
    engine.close()
    for name, prompt in prompts.items():
        expected = peft_logits(base, paths.get(name), prompt)
        torch.testing.assert_close(got[name], expected, atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        assert name == "base" or (expected - peft_logits(base, None, prompt)).abs().max() > 0.05, name


@pytest.mark.parametrize("field", REFUSED)
def test_refused_values_are_refused_by_the_name_of_the_field(base, tmp_path, field):
    train_vera(base, 0, **PLAIN).save_pretrained(tmp_path / "x")
    write_config(tmp_path / "x", **{field: REFUSED[field]})
    engine = Engine(base, {"x": str(tmp_path / "x")}, {"x": [3, 4]})
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: {field}=.* is not served"):
        engine.admit(["x"])
    engine.close()


def test_an_adapter_that_peft_saved_without_its_projections_is_refused_by_the_name_of_the_option(base, tmp_path):
    train_vera(base, 0, **PLAIN, save_projection=False).save_pretrained(tmp_path / "x")
    engine = Engine(base, {"x": str(tmp_path / "x")}, {"x": [3, 4]})
    with pytest.raises(AdapterError, match="save_projection=False is not served"):
        engine.admit(["x"])
    engine.close()


def test_an_adapter_of_a_model_with_merged_projections(tmp_path):
    """Phi-3 is Llama with qkv_proj and gate_up_proj: its adapters serve on the same weights unmerged."""
    base = save_base(tmp_path / "base", "Llama", False)
    merged = load_file(base / "model.safetensors")
    for layer in range(CONFIG["num_hidden_layers"]):
        for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            names = [f"model.layers.{layer}.{whole.split('.')[0]}.{part}_proj.weight" for part in parts]
            merged[f"model.layers.{layer}.{whole}_proj.weight"] = torch.cat([merged.pop(name) for name in names])
    config = transformers.Phi3Config(**CONFIG, tie_word_embeddings=False, pad_token_id=None, rms_norm_eps=1e-6)
    phi = transformers.Phi3ForCausalLM(config)
    phi.load_state_dict(merged)
    phi.save_pretrained(tmp_path / "phi")
    train_vera(tmp_path / "phi", 1, r=3, target_modules="all-linear").save_pretrained(tmp_path / "x")
    prompt = torch.randint(3, VOCAB, (12,)).tolist()
    engine = Engine(base, {"x": str(tmp_path / "x")}, {"x": prompt})
    engine.admit(["x"])
    torch.testing.assert_close(
        engine.run(["x"])["x"], peft_logits(tmp_path / "phi", tmp_path / "x", prompt), atol=1e-4, rtol=0
    )
    engine.close()


def test_the_products_as_lora_are_the_same_content(base, tmp_path):
    """Cached prefixes are shared with the LoRA adapter that computes the same, and with no other VeRA adapter."""
    train_vera(base, 0, **PLAIN).save_pretrained(tmp_path / "vera")
    train_vera(base, 1, **PLAIN).save_pretrained(tmp_path / "other")
    train(base, 0, **PLAIN, lora_alpha=PLAIN["r"]).save_pretrained(tmp_path / "lora")
    state = load_file(tmp_path / "vera" / "adapter_model.safetensors")
    products = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    for key, tensor in products.items():
        module, part, _ = key.rsplit(".", 2)
        vector = state[f"{module}.vera_lambda_{'d' if part == 'lora_A' else 'b'}"]
        rows, columns = tensor.shape
        products[key] = vector[:, None] * state[f"base_model.vera_{part[-1]}"][:rows, :columns]
    save_file(products, tmp_path / "lora" / "adapter_model.safetensors")
    names = ("vera", "other", "lora")
    engine = Engine(base, {name: str(tmp_path / name) for name in names}, {name: [3, 4] for name in names})
    engine.admit(names)
    vera, other, lora = (engine.requests[name].adapter.digest for name in names)
    assert vera == lora != other
    engine.close()


def test_the_documentation_has_the_table():
    docs = Path(__file__).parents[4] / "docs" / "guides" / "adapters.md"
    assert fields_table(VERA_FIELDS) in docs.read_text(encoding="utf-8")
