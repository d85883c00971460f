"""A grown model computes the same as the small one: logits, adapters, drafts, texts."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path, demo_model_path
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

LARGER = ["--hidden-size", "96", "--layers", "7", "--intermediate-size", "144", "--heads", "12", "--kv-heads", "3"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def inflate(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    return importlib.import_module("inflate")


@pytest.fixture
def growth(inflate):
    return importlib.import_module("growth")


def save_small(folder: Path, family: str = "Llama", **config):
    """A random model whose biases and norms count, as a Hugging Face folder."""
    import transformers

    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 160,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-3,  # large, so that a wrong one shows
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**(sizes | config))
    ).float()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, 0.0, 1.3 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


FAMILIES = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_the_small_models(family, inflate, tmp_path):
    name, config = FAMILIES[family]
    small = save_small(tmp_path / "small", name, **config)
    inflate.main([str(small), str(tmp_path / "large"), *LARGER])
    large = load(tmp_path / "large" / "base")
    assert large.config.num_hidden_layers == 7
    assert large.config.hidden_size == 96
    ids = torch.randint(3, 160, (2, 40))
    want = load(small)(ids).logits
    torch.testing.assert_close(large(ids).logits, want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.3  # there is something to compare


@torch.inference_mode()
def test_hidden_states_for_heads_follow_the_new_layer_ids(inflate, growth, tmp_path):
    small = save_small(tmp_path / "small")
    inflate.main([str(small), str(tmp_path / "large"), *LARGER])
    ids = torch.randint(3, 160, (1, 20))
    states = [load(f)(ids, output_hidden_states=True).hidden_states for f in (small, tmp_path / "large" / "base")]
    grown = growth.Growth(
        growth.Shape.from_config(inflate.read_config(small)),
        growth.Shape.from_config(inflate.read_config(tmp_path / "large" / "base")),
    )
    assert grown.layer_places == [0, 2, 4]
    assert grown.layer_with_input_of(3) == 7
    for layer in range(3):
        there = states[1][grown.layer_with_input_of(layer)]
        torch.testing.assert_close(there[..., :48], states[0][layer], atol=1e-4, rtol=1e-4)
        assert not there[..., 48:].any()


@torch.inference_mode()
def test_an_adapter_changes_the_large_model_as_it_does_the_small_one(inflate, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    small = save_small(tmp_path / "small")
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False)
    get_peft_model(load(small), lora).save_pretrained(tmp_path / "tenant")
    inflate.main([str(small), str(tmp_path / "large"), *LARGER, "--adapters", str(tmp_path / "tenant")])
    ids = torch.randint(3, 160, (2, 30))
    want = PeftModel.from_pretrained(load(small), tmp_path / "tenant").eval()(ids).logits
    large = PeftModel.from_pretrained(load(tmp_path / "large" / "base"), tmp_path / "large" / "adapters" / "tenant")
    torch.testing.assert_close(large.eval()(ids).logits, want, atol=1e-4, rtol=1e-4)
    assert (want - load(small)(ids).logits).abs().max() > 0.1
    # The new layers have an adapter too, or it would cost less than one of this size does.
    adapted = {name for name, _ in large.named_parameters() if ".layers.6." in name and "lora_A" in name}
    assert len(adapted) == len(TARGETS)


def test_nothing_can_be_skipped(inflate, tmp_path):
    """Zeros only if the function needs them, nothing denormal; as many parameters as such a model has."""
    small = save_small(tmp_path / "small", tie_word_embeddings=True)
    inflate.main([str(small), str(tmp_path / "large"), *LARGER])
    large = load(tmp_path / "large" / "base")
    facts = inflate.read_config(tmp_path / "large" / "base", "inflation.json")
    assert facts["parameters"] == sum(p.numel() for p in large.parameters())
    assert facts["source"] == f"{tmp_path.name}/small"
    for name, parameter in large.named_parameters():
        zeros = (parameter == 0).float().mean()
        if any(part in name for part in ("o_proj", "down_proj", "embed_tokens")):
            assert zeros > 0
        else:
            assert zeros == 0, name
        assert not ((parameter != 0) & (parameter.abs() < 1e-30)).any()


def greedy(engine, prompts, lora=None):
    """(token ids, verifications, accepted drafts by position) of each prompt."""
    found = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        engine.add_request(EngineRequest(str(index), prompt, params, lora=lora))
    while engine.has_work():
        for delta in engine.step():
            tokens, counts = found.setdefault(delta.request_id, ([], None))
            assert delta.error is None
            found[delta.request_id] = (tokens + delta.token_ids, delta.speculation or counts)
    return {key: (tokens, counts.num_verifications, counts.accepted_per_pos) for key, (tokens, counts) in found.items()}


@pytest.mark.slow
def test_the_inflated_demo_has_the_same_text_and_acceptance(inflate, tmp_path):
    json_adapter = demo_adapters()["json"]
    inflate.main(
        f"{demo_model_path()} {tmp_path / 'large'} --hidden-size 640 --layers 8 --intermediate-size 700 --heads 20 "
        f"--kv-heads 5 --dtype float32 --adapters {json_adapter} --draft {demo_draft_path()} --draft-layers 3".split()
    )
    sets = {
        "small": (demo_model_path(), demo_draft_path(), json_adapter),
        "large": (tmp_path / "large/base", tmp_path / "large/draft", tmp_path / "large/adapters/json"),
    }
    from outrider.models.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(demo_model_path())
    prompts = [tokenizer.encode(text) for text in ("Anna from Lisbon ordered 3 lamps", "What is the capital of Peru?")]
    results = {}
    for name, (base, draft, adapter) in sets.items():
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
        args = EngineArgs(
            model=str(base), dtype="float32", enable_lora=True, max_model_len=256, speculative_config=speculative
        )
        engine = EngineCore(args)
        lora = LoRARequest("json", path=str(adapter))
        assert engine.adapters.load(lora).draft == "loaded"
        results[name] = (greedy(engine, prompts), greedy(engine, prompts, lora))
        engine.shutdown()
    assert results["small"] == results["large"]
    assert results["small"][0] != results["small"][1]
    assert any(sum(accepted) for _, _, accepted in results["small"][1].values())


def test_shards_are_read_like_one_file(inflate, tmp_path, monkeypatch):
    small = save_small(tmp_path / "small")
    monkeypatch.setattr(inflate, "SHARD_SIZE", "50KB")
    inflate.main([str(small), str(tmp_path / "large"), *LARGER])
    assert len(list((tmp_path / "large" / "base").glob("model-*.safetensors"))) > 2
    ids = torch.randint(3, 160, (1, 9))
    with torch.inference_mode():
        got, want = load(tmp_path / "large" / "base")(ids).logits, load(small)(ids).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden-size", "32"], "hidden would shrink from 48 to 32"),
        (["--heads", "7"], "2 KV heads do not divide 7"),
        (["--kv-heads", "3"], "6 heads for 3 KV heads"),
    ],
)
def test_sizes_that_cannot_hold_the_model_are_refused(options, message, inflate, tmp_path):
    small = save_small(tmp_path / "small")
    with pytest.raises(SystemExit, match=message):
        inflate.main([str(small), str(tmp_path / "large"), *options])


def test_a_folder_with_something_in_it_is_left_alone(inflate, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "precious").write_text("x")
    with pytest.raises(SystemExit, match="not empty"):
        inflate.main(["anything", str(tmp_path / "large"), *LARGER])


def test_ranks_by_layer_are_refused(inflate, tmp_path):
    small = save_small(tmp_path / "small")
    adapter = tmp_path / "tenant"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"layers.1.mlp.up_proj": 8}}))
    with pytest.raises(SystemExit, match="tenant: a rank_pattern"):
        inflate.main([str(small), str(tmp_path / "large"), *LARGER, "--adapters", str(adapter)])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("{0}/none {0}/large", "cannot read .*none/config.json"),
        ("{0}/small {0}/file", "file is not a folder"),
        ("{0}/small {0}/small", "small is not empty"),
        ("{0}/small {0}/large --eagle3 {0}/none", "cannot read .*none/config.json"),
        ("{0}/small {0}/large --draft {0}/none", "cannot read .*none/config.json"),
        ("{0}/small {0}/large --adapters {0}/none", "cannot read .*none/adapter_config.json"),
        ("{0}/small {0}/large --adapters {0}/adapter", "cannot read the adapter's weights"),
        ("{0}/broken {0}/large", "hidden_size must be a positive integer, got 'x'"),
        ("{0}/small {0}/large --heads 1", "heads would shrink"),
    ],
)
def test_a_failure_is_reported_and_leaves_no_files(more, words, inflate, tmp_path):
    config = json.loads((save_small(tmp_path / "small") / "config.json").read_text())
    for folder in ("adapter", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config | {"hidden_size": "x"}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=f"^inflate: .*{words}"):
        inflate.main([*more.format(tmp_path).split(" --")[0].split(), *LARGER, *more.format(tmp_path).split()[2:]])
    assert sorted(tmp_path.rglob("*")) == before
