"""The shipped files: their sizes, their shapes and the tokenizer."""

import json
from random import Random

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from outrider.models.demo import DEMO_MODEL_NAME, demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path

LIMIT = 12_500_000  # bytes, of everything shipped


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


def read_json(path):
    return json.loads(path.read_text())


def test_everything_shipped_is_small():
    root = demo_model_path().parent
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert 1_000_000 < size <= LIMIT


def test_models_have_one_shape_and_one_vocabulary():
    base, draft = read_json(demo_model_path() / "config.json"), read_json(demo_draft_path() / "config.json")
    for config in (base, draft):
        assert config["architectures"] == ["MistralForCausalLM"]
        assert config["dtype"] == "bfloat16"
        assert (config["max_position_embeddings"], config["sliding_window"]) == (16384, 2048)
    assert base["vocab_size"] == draft["vocab_size"]
    name = "tokenizer.json"
    assert (demo_model_path() / name).read_bytes() == (demo_draft_path() / name).read_bytes()
    weights = "model.safetensors"
    assert (demo_model_path() / weights).stat().st_size > 4 * (demo_draft_path() / weights).stat().st_size


def test_the_head_reads_the_base_model_and_shares_its_matrices():
    base, head = read_json(demo_model_path() / "config.json"), read_json(demo_eagle3_path() / "config.json")
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head["use_sliding_window"]
    assert head["max_window_layers"] == 0
    for name in ("max_position_embeddings", "sliding_window"):
        assert head[name] == base[name]
    assert head["target_hidden_size"] == head["hidden_size"] == base["hidden_size"]
    assert head["draft_vocab_size"] == head["vocab_size"] == base["vocab_size"]
    with safe_open(demo_eagle3_path() / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert {name.split(".")[0] for name in names} == {"fc", "midlayer", "norm"}


@pytest.mark.parametrize(("method", "drafter"), [("draft_model", "draft"), ("eagle3", "eagle3")])
def test_adapters_bring_draft_weights(method, drafter):
    for folder in demo_adapters().values():
        config = read_json(folder / "draft" / method / "adapter_config.json")
        assert config["peft_type"] == "LORA"
        assert config["base_model_name_or_path"] == f"{DEMO_MODEL_NAME}-{drafter}"
        assert (folder / "draft" / method / "adapter_model.safetensors").exists()
        assert "peft_version" not in config, "written by `outrider train-draft`, as the card says"


def test_adapters_are_plain_peft():
    ranks = set()
    for folder in demo_adapters().values():
        config = read_json(folder / "adapter_config.json")
        assert config["peft_type"] == "LORA"
        assert config["base_model_name_or_path"] == DEMO_MODEL_NAME
        assert set(config["target_modules"]) >= {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        }
        assert (folder / "adapter_model.safetensors").exists()
        ranks.add(config["r"])
    assert len(ranks) > 1


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two  spaces\n\ttab", "Zoë 東京 🙂 \x00 naïve", "12345 + 0.5", "<b>x</b>"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_random_text_survives_the_tokenizer(tokenizer):
    rng = Random(0)
    for _ in range(50):
        text = "".join(chr(rng.choice((rng.randint(1, 0x2FF), rng.randint(0x4E00, 0x9FFF)))) for _ in range(20))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.encode("Hello")[0] == tokenizer.bos_token_id
    generation = read_json(demo_model_path() / "generation_config.json")
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"
    closed = [*messages, {"role": "assistant", "content": "Hello!"}]
    assert tokenizer.apply_chat_template(closed, tokenize=False) == text + "Hello!<|end|>\n"
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "Hi"}], tokenize=False)
