"""Adapters on layers with experts: attention, router and the experts themselves, in every form that PEFT writes."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.lora.device.batching import LONG_RUN
from outrider.platform.core.errors import AdapterError

from .reference import CONFIG, VOCAB, Engine, load_base, peft_logits, save_base, train

pytestmark = pytest.mark.slow

HIDDEN, INNER = CONFIG["hidden_size"], 24
SPARSE = {"moe_intermediate_size": INNER, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}
FAMILIES = {
    "Qwen3Moe": {**SPARSE, "norm_topk_prob": True},
    "Qwen2Moe": {**SPARSE, "shared_expert_intermediate_size": 40},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": INNER},
}
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS = {
    "attention": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "router": {"r": 2, "target_modules": ["v_proj"], "target_parameters": ["gate.weight"]},
    "experts": {"r": 3, "target_modules": ["q_proj"], "target_parameters": PARAMETERS},
    "down": {"r": 2, "target_modules": [], "target_parameters": PARAMETERS[1:]},
}
LENGTHS = {
    "base": 9, "attention": 30, "router": LONG_RUN + 3, "experts": 17, "each": 40, "down": 8, "experts 2": LONG_RUN + 9,
}  # fmt: skip


def each_expert(family, folder, rank=4):
    """Write an adapter with keys of single experts, as PEFT does if each expert is a module of its own."""
    blocks = {f"experts.{expert}": INNER for expert in range(4)}
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family == "Mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    elif family == "Qwen2Moe":
        blocks["shared_expert"] = FAMILIES[family]["shared_expert_intermediate_size"]
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for part, inner in blocks.items():
            shapes = (inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner)
            for name, (rows, columns) in zip(names, shapes, strict=True):
                key = f"base_model.model.model.layers.{layer}.{block}.{part}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * columns**-0.5
                tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(names), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(written))


@torch.inference_mode()
def merged_logits(base, folder, prompt):
    """Logits with the deltas of `each_expert` added to the weights; PEFT 0.21 mixes up those of a shared expert."""
    model = load_base(base).eval()
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, a in tensors.items():
        if not key.endswith("lora_A.weight"):
            continue
        delta = 2 * tensors[key.replace("lora_A", "lora_B")] @ a
        layer, _, *part, name = key.removesuffix(".lora_A.weight").partition("layers.")[2].split(".")
        mlp = model.model.layers[int(layer)].mlp
        if part == ["shared_expert"]:
            getattr(mlp.shared_expert, name).weight.add_(delta)
        elif name in ("down_proj", "w2"):
            mlp.experts.down_proj[int(part[1])].add_(delta)
        else:
            first = INNER * (name in ("up_proj", "w3"))
            mlp.experts.gate_up_proj[int(part[1]), first : first + INNER].add_(delta)
    return model(torch.tensor([prompt])).logits[0]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """(model folder, adapters' folders, prompts by request, PEFT's logits by request)."""
    folder = tmp_path_factory.mktemp("experts")
    base = save_base(folder / "base", request.param, False, **FAMILIES[request.param])
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        train(base, seed, lora_alpha=6, **options).save_pretrained(folder / name)
    each_expert(request.param, folder / "each")
    paths = {name: str(folder / name) for name in (*ADAPTERS, "each")}
    generator = torch.Generator().manual_seed(0)
    prompts = {name: torch.randint(3, VOCAB, (count,), generator=generator).tolist() for name, count in LENGTHS.items()}
    logits = {
        name: peft_logits(base, paths.get(name.split()[0]), prompt)
        for name, prompt in prompts.items()
        if name != "each"
    }
    logits["each"] = merged_logits(base, folder / "each", prompts["each"])
    return base, paths, prompts, logits


@pytest.mark.parametrize("chunk_sizes", [(1000,), (7, 2, 30, 1, LONG_RUN)], ids=["whole", "chunks"])
def test_mixed_batch(case, chunk_sizes):
    base, paths, prompts, expected = case
    engine = Engine(base, paths, prompts)
    engine.admit(prompts)
    got = engine.run(prompts, chunk_sizes)
    for name in prompts:
        torch.testing.assert_close(
            got[name], expected[name], atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
    plain = Engine(base, {}, prompts)
    for name in ("router", "experts", "each", "down"):
        assert (plain.run([name])[name] - expected[name]).abs().max() > 0.05, name
    engine.close()


def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(case):
    base, paths, prompts, _ = case
    engine = Engine(base, paths, prompts, dtype="bfloat16", batch_invariant=True)
    engine.admit(prompts)
    together = engine.run(prompts, (5, 40))
    for name in ("base", "experts", "each"):
        assert torch.equal(engine.run([name])[name], together[name])
    engine.close()


@pytest.mark.parametrize("change", ["lora_A", "lora_B"])
def test_parameters_of_other_experts_are_refused(case, tmp_path, change):
    base, paths, prompts, _ = case
    tensors = load_file(f"{paths['experts']}/adapter_model.safetensors")
    key = next(key for key in tensors if ".experts." in key and change in key)
    tensors[key] = torch.cat([tensors[key], tensors[key]], int(change == "lora_A"))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    shutil.copy(f"{paths['experts']}/adapter_config.json", tmp_path)
    with pytest.raises(AdapterError, match=r"base mismatch.*experts"):
        Engine(base, {"experts": str(tmp_path)}, {"experts": prompts["experts"]}).admit(["experts"])


@pytest.mark.parametrize(("version", "served"), [("0.18.1", False), (None, False), ("0.19.0", True)])
def test_square_parameters_of_a_peft_that_transposes_them_are_refused(case, tmp_path, version, served):
    """Their shapes are ambiguous; those of other sizes are refused as such."""
    base, paths, prompts, _ = case
    shutil.copytree(paths["experts"], tmp_path / "experts")
    file = tmp_path / "experts" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_version": version}))
    engine = Engine(base, {"experts": str(tmp_path / "experts")}, {"experts": prompts["experts"]})
    with contextlib.nullcontext() if served else pytest.raises(AdapterError, match="square parameters transposed"):
        engine.admit(["experts"])
    engine.close()


@pytest.mark.parametrize(
    ("field", "ending", "message"),
    [
        ("lora_bias", "lora_B.bias", r"experts\.0.*a bias is not served on experts"),
        ("use_dora", "lora_magnitude_vector", r"experts\.0.*DoRA \(use_dora\) is not served on experts"),
    ],
)
def test_unsupported_expert_options_are_refused(case, tmp_path, field, ending, message):
    base, paths, prompts, _ = case
    tensors = load_file(f"{paths['each']}/adapter_model.safetensors")
    tensors |= {
        key.replace("lora_B.weight", ending): torch.ones(len(tensor))
        for key, tensor in tensors.items()
        if "lora_B" in key
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = json.loads((Path(paths["each"]) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {field: True}))
    with pytest.raises(AdapterError, match=message):
        Engine(base, {"each": str(tmp_path)}, {"each": prompts["each"]}).admit(["each"])


def test_a_square_parameter_is_oriented_like_the_rest_of_its_file(tmp_path):
    """PEFT writes those of Llama 4 transposed."""
    sizes = {"intermediate_size": HIDDEN, "intermediate_size_mlp": 40, "num_local_experts": 4, "head_dim": 12}
    base = save_base(tmp_path / "base", "Llama4Text", False, interleave_moe_layer_step=1, **sizes)
    adapter = train(base, 0, r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=PARAMETERS)
    adapter.save_pretrained(tmp_path / "adapter")
    prompts = {"experts": list(range(3, 20))}
    engine = Engine(base, {"experts": str(tmp_path / "adapter")}, prompts)
    engine.admit(prompts)
    expected = peft_logits(base, str(tmp_path / "adapter"), prompts["experts"])
    torch.testing.assert_close(engine.run(prompts, (1000,))["experts"], expected, atol=1e-4, rtol=0)
    engine.close()
