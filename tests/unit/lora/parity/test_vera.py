"""VeRA adapters beyond their fields (`test_kind_fields.py`)."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outrider.platform.core.errors import AdapterError

from .kinds import VERA, train_vera
from .reference import CONFIG, VOCAB, Engine, peft_logits, save_base, train

pytestmark = pytest.mark.slow

PLAIN = VERA.plain


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("vera") / "base", "Qwen2", False)


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
