"""Adapters on each projection of GPT-2 and OPT: logits of mixed batches equal PEFT's."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .kinds import KIND_CASES
from .reference import VOCAB, Engine, peft_logits, save_base, train

pytestmark = pytest.mark.slow

C_ATTN = ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]
QKV = ["q_proj", "k_proj", "v_proj"]
# (family in transformers, changes of the sizes, projections, embeddings)
FAMILIES = {
    "gpt2": ("GPT2", {}, C_ATTN, "wte"),
    "opt": ("OPT", {}, [*QKV, "out_proj", "fc1", "fc2"], "embed_tokens"),
    "opt-projected": (
        *("OPT", {"word_embed_proj_dim": 24, "do_layer_norm_before": False}),
        *(["project_in", "project_out"], "embed_tokens"),
    ),
    "bigcode": ("GPTBigCode", {"multi_query": False}, C_ATTN, "wte"),
    "neox": (
        *("GPTNeoX", {"hidden_size": 64}),
        *(["query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"], "embed_in"),
    ),
    "phi": ("Phi", {}, [*QKV, "dense", "fc1", "fc2"], "embed_tokens"),
    "stablelm": (
        *("StableLm", {"hidden_size": 64, "use_parallel_residual": True, "num_key_value_heads": 2}),
        *([*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"], "embed_tokens"),
    ),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2}, [*QKV, "o_proj", "c_fc", "c_proj"], "embed_tokens"),
    "falcon": (
        *("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80}),
        *(["query_key_value", "self_attention.dense", "dense_h_to_4h", "dense_4h_to_h"], "word_embeddings"),
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """(model folder, adapters' folders, prompts by request, PEFT's logits by request)."""
    family, changes, projections, table = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"num_key_value_heads": None, "ffn_dim": 80, "max_position_embeddings": 64, **changes}
    base = save_base(folder / "base", family, family == "GPT2", **sizes)
    adapters = {f"on-{name}": {"r": 4, "lora_alpha": 8, "target_modules": rf".*\.{name}"} for name in projections}
    adapters["all"] = {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True}
    adapters["dora"] = {"r": 3, "lora_alpha": 6, "target_modules": projections, "use_dora": True}
    adapters["words"] = {"r": 5, "lora_alpha": 5, "target_modules": [table, "lm_head"]}
    adapters["saved"] = {**adapters["dora"], "use_dora": False, "modules_to_save": ["lm_head"]}
    adapters["saved-both"] = {**adapters["dora"], "use_dora": False, "modules_to_save": [table, "lm_head"]}
    adapters["saved-table"] = {**adapters["dora"], "modules_to_save": [table]}
    paths = {name: str(folder / name) for name in adapters}
    for seed, (name, options) in enumerate(adapters.items()):
        train(base, seed, **options).save_pretrained(paths[name])
    for name, kind in KIND_CASES.items():
        paths[name] = str(folder / name)
        kind.train(base, 0, **kind.plain | {"target_modules": projections}).save_pretrained(paths[name])
    generator = torch.Generator().manual_seed(3)
    names = ["base", *paths]
    prompts = {
        name: torch.randint(3, VOCAB, (7 + 4 * i,), generator=generator).tolist() for i, name in enumerate(names)
    }
    return base, paths, prompts, {name: peft_logits(base, paths.get(name), prompts[name]) for name in names}


def test_a_head_has_the_name_that_older_transformers_gave_it(case, tmp_path):
    """GPT-NeoX's was `embed_out`."""
    path, paths, prompts, expected = case
    old = {}
    for name in ("words", "saved-both"):
        old[name] = str(tmp_path / name)
        shutil.copytree(paths[name], old[name])
        file, config = (tmp_path / name / leaf for leaf in ("adapter_model.safetensors", "adapter_config.json"))
        save_file({key.replace("lm_head", "embed_out"): tensor for key, tensor in load_file(file).items()}, file)
        config.write_text(config.read_text().replace("lm_head", "embed_out"))
    engine = Engine(path, old, {name: prompts[name] for name in old})
    engine.admit(old)
    for name, logits in engine.run(list(old)).items():
        torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=0)
    engine.close()


@pytest.mark.parametrize("chunk_sizes", [(1000,), (7, 2, 30, 1)], ids=["whole", "chunks"])
def test_mixed_batch(case, chunk_sizes):
    path, paths, prompts, expected = case
    engine = Engine(path, paths, prompts, max_loras=len(paths))
    engine.admit(prompts)
    got = engine.run(prompts, chunk_sizes)
    for name in prompts:
        torch.testing.assert_close(
            got[name], expected[name], atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
    engine.close()


def test_every_adapter_counts(case):
    path, paths, prompts, expected = case
    for name, folder in paths.items():
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        base = peft_logits(path, None, prompts[name])
        assert (expected[name] - base).abs().max() > 0.05, (name, config["target_modules"])
