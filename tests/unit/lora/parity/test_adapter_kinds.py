"""Every kind of LoRA that PEFT saves, several kinds in one batch, gives PEFT's logits."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import IA3Config, PeftModel, PeftType, get_peft_model
from peft.utils import load_peft_weights
from safetensors.torch import load_file, save_file

from outrider.lora.files.kinds import KINDS as KINDS_BY_TYPE
from outrider.platform.core.errors import AdapterError

from .kinds import KIND_CASES
from .reference import ALL, CONFIG, VOCAB, Engine, load_base, peft_logits, save_base, train

pytestmark = pytest.mark.slow

DORA = {"use_dora": True}
EVERYWHERE = ["embed_tokens", "lm_head", *ALL]
KINDS = {
    # gains on all modules of the merged projections, or on some
    "dora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **DORA},
    "dora-slices": {"r": 3, "lora_alpha": 9, "target_modules": ["k_proj", "up_proj", "down_proj"], **DORA},
    "dora-rs": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ALL,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {r"layers\.1\.mlp\.gate_proj": 11},
        **DORA,
    },
    "dora-head": {"r": 3, "lora_alpha": 3, "target_modules": ["lm_head", "o_proj"], **DORA},
    "dora-tokens": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"], **DORA},
    "dora-everywhere": {"r": 2, "lora_alpha": 4, "target_modules": EVERYWHERE, **DORA},
    # which layers and modules
    "one-layer": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1},
    "layers": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj"],
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
    },
    "excluded": {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["down_proj", "k_proj"]},
    "excluded-regex": {"r": 2, "lora_alpha": 8, "target_modules": ALL, "exclude_modules": r".*\.0\..*"},
    "regex": {"r": 3, "lora_alpha": 8, "target_modules": r"model\.layers\.[01]\.(mlp\.up_proj|self_attn\.[qk]_proj)"},
    # patterns: short names, whole names, anchored ones, the first that matches
    "patterns": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ALL,
        "use_rslora": True,
        "rank_pattern": {
            "model.layers.0.self_attn.q_proj": 5,
            "q_proj": 3,
            "^model.layers.1.mlp.up_proj": 7,
            "^layers.0.mlp.up_proj": 8,
            r"layers\.\d+\.self_attn\.(k|v)_proj": 4,
        },
        "alpha_pattern": {"up_proj": 5, "^model.layers.0.self_attn.q_proj": 1, "self_attn.q_proj": 2},
    },
    "gaussian": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 4, "lora_alpha": 2, "target_modules": ALL, "init_lora_weights": "orthogonal"},
    # biases: of lora_B, and the model's own, trained
    "lora-bias": {"r": 3, "lora_alpha": 9, "target_modules": ["lm_head", *ALL], "lora_bias": True},
    "biases": {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj", "up_proj"], "bias": "all"},
    # the embedding and the head trained as a whole, or some rows of them
    "saved": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved-tokens": {"r": 3, "lora_alpha": 8, "target_modules": ALL, "modules_to_save": ["embed_tokens"], **DORA},
    "rows": {"r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "trainable_token_indices": [9, 3, 77, 130]},
    # the head saved whole, but as it was
    "saved-head": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
FAMILIES = {"Llama": False, "Qwen2": True}


def convert(folder, dtype):
    """Store an adapter's tensors in another dtype."""
    file = Path(folder) / "adapter_model.safetensors"
    save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)


def save_pissa(base, folder):
    """PEFT's conversion of PiSSA for unchanged base weights."""
    options = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"}
    model = train(base, 5, **options)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "initial")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.peft_config["default"].init_lora_weights = "pissa"
    model.save_pretrained(folder / "raw")
    model.save_pretrained(folder / "pissa", path_initial_model_for_weight_conversion=str(folder / "initial"))
    return str(folder / "pissa")


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request, tmp_path_factory):
    """(model folder, adapters' folders, prompts by request, PEFT's logits by request)."""
    folder = tmp_path_factory.mktemp(request.param.lower())
    base = save_base(folder / "base", request.param, FAMILIES[request.param])
    paths = {name: str(folder / name) for name in KINDS}
    for seed, (name, options) in enumerate(KINDS.items()):
        train(base, seed, **options).save_pretrained(paths[name])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        paths[name] = str(folder / name)
        train(base, 50, r=4, lora_alpha=8, target_modules="all-linear", **DORA).save_pretrained(paths[name])
        convert(paths[name], dtype)
    paths["bin"] = str(folder / "bin")
    train(base, 51, **KINDS["dora-everywhere"]).save_pretrained(paths["bin"], safe_serialization=False)
    for name, kind in KIND_CASES.items():
        paths[name] = str(folder / name)
        kind.train(base, 52, **kind.mixed).save_pretrained(paths[name])
        paths[f"{name}-fp16"] = str(folder / f"{name}-fp16")
        kind.train(base, 54, **kind.mixed | {"target_modules": ALL}).save_pretrained(paths[f"{name}-fp16"])
        convert(paths[f"{name}-fp16"], torch.float16)
    paths["pissa"] = save_pissa(base, folder)
    names = ["base", *paths, "base-2"]
    prompt_generator = torch.Generator().manual_seed(53)
    prompts = {
        name: torch.randint(3, VOCAB, (5 + 9 * i % 37,), generator=prompt_generator).tolist()
        for i, name in enumerate(names)
    }
    logits = {name: peft_logits(base, paths.get(name), prompt) for name, prompt in prompts.items()}
    return base, paths, prompts, logits


def assert_near(got, expected, tolerance=1e-4):
    for name, logits in got.items():
        torch.testing.assert_close(
            logits, expected[name], atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("chunk_sizes", [(1000,), (1,), (7, 2, 30, 1)], ids=["whole", "one by one", "chunks"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_kinds_in_one_batch(case, chunk_sizes, batch_invariant):
    base, paths, prompts, expected = case
    engine = Engine(base, paths, prompts, max_loras=len(paths), batch_invariant=batch_invariant)
    engine.admit(prompts)
    assert_near(engine.run(prompts, chunk_sizes), expected)
    engine.close()


def test_each_kind_is_far_from_the_base_and_its_vectors_matter(case):
    base, paths, prompts, expected = case
    for name in paths:
        assert (expected[name] - peft_logits(base, None, prompts[name])).abs().max() > 0.1, name
    engine = Engine(base, paths, prompts, max_loras=len(paths))
    engine.admit(prompts)
    for linear in engine.model.linears():
        linear.gains = None
    engine.model.embedding.lookup_gains = engine.model.embedding.head_gains = engine.model.embedding.own_rows = None
    for name, got in engine.run(prompts).items():
        keys = "".join(load_peft_weights(paths[name])) if name in paths else ""
        trained = any(word in keys for word in ("lora_magnitude_vector", "bias", "embed_tokens.weight", "_delta"))
        assert ((got - expected[name]).abs().max() > 0.05) == trained, name
    engine.close()


def test_gains_leave_with_their_adapters(case):
    """Few adapters fit: rows and their gains are reused by the next one."""
    base, paths, prompts, expected = case
    engine = Engine(base, paths, prompts, max_loras=2)
    for name in prompts:
        engine.admit([name])
        assert_near(engine.run([name]), expected)
        engine.manager.forget(engine.requests[name])
    engine.close()


def test_no_company_changes_a_bit_in_invariant_mode(case):
    base, paths, prompts, _ = case
    names = ("base", "dora", "one-layer", "dora-slices", "dora-everywhere")
    engine = Engine(base, paths, {name: prompts[name] for name in names}, batch_invariant=True)
    engine.admit(names)
    alone = {name: engine.run([name])[name] for name in names}
    for order in (names, names[::-1]):
        for chunk_sizes in ((1000,), (3, 17, 1)):
            together = engine.run(order, chunk_sizes)
            assert all(torch.equal(together[name], alone[name]) for name in names)
    engine.close()


def test_bfloat16_costs_an_adapter_with_magnitudes_no_more_than_others(case):
    base, paths, prompts, expected = case
    engine = Engine(base, paths, prompts, max_loras=len(paths), dtype="bfloat16")
    engine.admit(prompts)
    errors = {
        name: ((got - expected[name]).norm() / expected[name].norm()).item()
        for name, got in engine.run(prompts).items()
    }
    engine.close()
    plain = max(errors[name] for name in ("base", "excluded", "patterns", "regex"))
    assert all(error < 2 * plain for name, error in errors.items() if "dora" in name), errors
    assert max(errors.values()) < 0.05, errors


def refused(path, base, message):
    engine = Engine(base, {"x": str(path)}, {"x": [3, 4]})
    with pytest.raises(AdapterError, match=message):
        engine.admit(["x"])
    engine.close()


@pytest.mark.parametrize("family", ["Llama"])
def test_kinds_that_are_refused_by_name(tmp_path, family):
    base = save_base(tmp_path / "base", family, False)
    common = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    kinds = {
        "modules_to_save.*mlp": {"modules_to_save": ["mlp"]},
        "init_lora_weights": {"init_lora_weights": "olora"},
        "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    }
    for index, (message, options) in enumerate(kinds.items()):
        train(base, index, **common, **options).save_pretrained(tmp_path / str(index))
        refused(tmp_path / str(index), base, message)
    save_pissa(base, tmp_path)
    refused(tmp_path / "raw", base, "init_lora_weights='pissa'")


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 5]}, {"bias": "all"}],
    ids=["head", "rows", "biases"],
)
def test_parts_of_an_activated_adapter_that_peft_applies_to_all_tokens_are_refused(tmp_path, options):
    base = save_base(tmp_path / "base", "Qwen2", False)
    activated = {"r": 2, "target_modules": ["q_proj"], "alora_invocation_tokens": [3, 4], "task_type": "CAUSAL_LM"}
    model = train(base, 0, **activated, **options)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "x")
    refused(tmp_path / "x", base, "alora_invocation_tokens is not served with trained biases or whole")


def test_other_methods_are_refused_by_name(tmp_path):
    base = save_base(tmp_path / "base", "Llama", False)
    train(base, 0, r=2, target_modules=["q_proj"]).save_pretrained(tmp_path / "x")
    file = tmp_path / "x" / "adapter_config.json"
    config = json.loads(file.read_text())
    *first, last = KINDS_BY_TYPE
    message = f"peft_type={{}} is not served (only {', '.join(first)} and {last} are)"
    assert {*KINDS_BY_TYPE} < {one.value for one in PeftType}
    for other in ["lora", ["LORA"], None, *({one.value for one in PeftType} - {*KINDS_BY_TYPE})]:
        file.write_text(json.dumps(config | {"peft_type": other}))
        refused(tmp_path / "x", base, re.escape(message.format(repr(other))))
    options = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    get_peft_model(load_base(base), IA3Config(**options)).save_pretrained(tmp_path / "ia3")
    refused(tmp_path / "ia3", base, re.escape(message.format("'IA3'")))


def test_an_adapter_of_a_model_with_merged_projections(tmp_path):
    """Phi-3 is Llama with qkv_proj and gate_up_proj: its adapters serve on the same weights unmerged."""
    base = save_base(tmp_path / "base", "Llama", False)
    unmerged = load_file(base / "model.safetensors")
    merged = {}
    for key, tensor in unmerged.items():
        for whole, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            names = [f"{part}_proj" for part in parts]
            if names[0] in key:
                merged[key.replace(names[0], whole)] = torch.cat([unmerged[key.replace(names[0], n)] for n in names])
        if not any(f"{part}_proj" in key for part in ("q", "k", "v", "gate", "up")):
            merged[key] = tensor
    config = transformers.Phi3Config(**CONFIG, tie_word_embeddings=False, pad_token_id=None, rms_norm_eps=1e-6)
    phi = transformers.Phi3ForCausalLM(config)
    phi.load_state_dict(merged)
    phi.save_pretrained(tmp_path / "phi")
    kinds = {
        "merged": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "rank_pattern": {"qkv_proj": 6}},
        "merged-dora": {"target_modules": "all-linear", "use_rslora": True, **DORA},
    }
    paths = {name: str(tmp_path / name) for name in kinds}
    for seed, (name, options) in enumerate(kinds.items()):
        train(tmp_path / "phi", seed, r=3, lora_alpha=6, **options).save_pretrained(paths[name])
    prompts = {name: torch.randint(3, VOCAB, (12,)).tolist() for name in ("base", *kinds)}
    expected = {name: peft_logits(tmp_path / "phi", paths.get(name), prompt) for name, prompt in prompts.items()}
    engine = Engine(base, paths, prompts)
    engine.admit(prompts)
    assert_near(engine.run(prompts, (5, 2)), expected)
    engine.close()


def test_adapters_of_other_names_and_of_the_inner_model(tmp_path):
    """PEFT saves an adapter that is not called "default" in a folder of its name."""
    base = save_base(tmp_path / "base", "Llama", False)
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "up_proj"], **DORA}
    whole = train(base, 1, **options)
    whole.add_adapter("second-try", whole.peft_config["default"])
    for name, parameter in whole.named_parameters():
        if "second-try" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    whole.save_pretrained(tmp_path / "x")
    inner = transformers.AutoModel.from_pretrained(base, dtype=torch.float32)
    inner_adapter = get_peft_model(inner, train(base, 2, **options).peft_config["default"])
    for parameter in inner_adapter.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    inner_adapter.save_pretrained(tmp_path / "inner")
    paths = {
        "first": str(tmp_path / "x"),
        "second": str(tmp_path / "x" / "second-try"),
        "inner": str(tmp_path / "inner"),
    }
    prompts = {name: [5, 9, 3, 77, 20] for name in paths}
    expected = {name: peft_logits(base, paths[name], prompts[name]) for name in ("first", "second")}
    reference = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    reference.model = PeftModel.from_pretrained(reference.model, paths["inner"])
    with torch.inference_mode():
        expected["inner"] = reference(torch.tensor([prompts["inner"]])).logits[0]
    engine = Engine(base, paths, prompts)
    engine.admit(prompts)
    assert_near(engine.run(prompts), expected)
    engine.close()
    assert json.loads((tmp_path / "inner" / "adapter_config.json").read_text())["use_dora"]
