"""Families without native code run through transformers': base and adapters equal PEFT, speculation and the prefix
cache change nothing, and what does not go is refused by name."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.models.checkpoint.loader import ModelOptions, load_model, read_facts
from outrider.models.layers.linear import Linear
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

from ..family_records import record
from ..quantized_files import CASES, write_quantized

WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {
    "Apertus": {},
    "Arcee": {},
    "CodeGen": {"rotary_dim": 8},
    "Cohere": {"logit_scale": 2.0, "use_qk_norm": True},
    "Cohere2": {"logit_scale": 2.0, **WINDOWS},
    "Dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 12,
    },
    "Ernie4_5": {"head_dim": 12},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "Exaone4": WINDOWS,
    "GPTBigCode": {"n_positions": 256},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeoX": {},
    "GptOss": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "Helium": {"head_dim": 12},
    "HunYuanDenseV1": {"head_dim": 12},
    "Llama": {},
    "Nemotron": {},
    "Olmo": {"clip_qkv": 2.0},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Persimmon": {},
    "Phi": {"qk_layernorm": True},
    "SeedOss": {"head_dim": 12},
    "StableLm": {"num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.25},
    "Starcoder2": {"sliding_window": 9},
}
TARGETS = {name: ["q_proj", "k_proj", "v_proj", "o_proj"] for name in ("GptOss", "Olmoe", "Dots1", "Ernie4_5_Moe")}
"""Targets of families whose experts are parameters."""
PROMPT = [5, 6, 7, 8] * 6
PROMPTS = [PROMPT, [9, 10, 11], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


def save(family: str, folder: Path, **config: object) -> torch.nn.Module:
    """A tiny random model of the family, peaked enough that its tokens are clear."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**{**SIZES, **config})
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.dim() == 1 else 1.3 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, attn_implementation="eager").eval()


def check_text(model: torch.nn.Module, prompt: list[int], outcome) -> float:
    """Each token is the model's best after the ones before it, with its log-probability; returns the largest
    difference."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + outcome.token_ids[:-1]])).logits[0, len(prompt) - 1 :].float()
    assert logits.argmax(-1).tolist() == outcome.token_ids
    wanted = logits.log_softmax(-1).max(-1).values
    got = torch.tensor([entry.logprobs[0] for entry in outcome.logprobs])
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)
    return float((got - wanted).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers_and_peft(family, tmp_path, make_engine, run):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = save(family, tmp_path / "model", **FAMILIES[family])
    torch.manual_seed(1)
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if family in TARGETS else None
    targets = {"target_modules": TARGETS.get(family, "all-linear"), "target_parameters": parameters}
    config = LoraConfig(r=4, lora_alpha=8, **targets, init_lora_weights=False)
    get_peft_model(save(family, tmp_path / "copy", **FAMILIES[family]), config).save_pretrained(tmp_path / "adapter")
    options = {"model": str(tmp_path / "model"), "model_impl": "transformers", "enable_lora": True, "max_lora_rank": 4}
    lora = LoRARequest("a", path=str(tmp_path / "adapter"))
    jobs = [(prompt, GREEDY, adapter) for prompt in PROMPTS for adapter in (None, lora)]

    engine = make_engine(**options)
    outcomes = run(engine, jobs)
    errors: list[list[float]] = [[], []]
    for (prompt, _, adapter), outcome in zip(jobs, outcomes, strict=True):
        if adapter is None:
            errors[0].append(check_text(base, prompt, outcome))
    again = run(engine, jobs)
    assert [o.token_ids for o in again] == [o.token_ids for o in outcomes]
    assert all(o.num_cached_tokens > 0 for (prompt, *_), o in zip(jobs, again, strict=True) if len(prompt) > 16)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for (prompt, _, adapter), outcome in zip(jobs, outcomes, strict=True):
        if adapter is not None:
            errors[1].append(check_text(adapted, prompt, outcome))

    drafting = make_engine(**options, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    drafted = run(drafting, jobs)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in outcomes]
    for limits in ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, {"num_gpu_blocks_override": 8}):
        limited = make_engine(**options, **limits, block_size=16, enable_prefix_caching=False, max_model_len=64)
        assert [o.token_ids for o in run(limited, jobs)] == [o.token_ids for o in outcomes]
        assert (limited.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in limits)
    shown = ["base", "LoRA", "speculation", "prefix cache", "preemption", "chunks"]
    record(f"{family}ForCausalLM", "transformers", shown, [max(part) for part in errors])


def test_rotary_angles_are_float32_in_a_bfloat16_model(tmp_path, make_engine, run):
    base = save("Olmo", tmp_path, **FAMILIES["Olmo"]).bfloat16()
    (outcome,) = run(make_engine(model=str(tmp_path), dtype="bfloat16"), [(PROMPT, GREEDY)])
    with torch.no_grad():
        logits = base(torch.tensor([PROMPT + outcome.token_ids[:-1]])).logits[0, len(PROMPT) - 1 :].float()
    wanted = logits.log_softmax(-1)[torch.arange(len(logits)), outcome.token_ids]
    torch.testing.assert_close(
        torch.tensor([entry.logprobs[0] for entry in outcome.logprobs]), wanted, atol=0.1, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("Olmo", "gptq-row"), ("Olmo", "awq"), ("Olmo", "ct-w8a8"), ("Dots1", "ct-fp8"), ("Dots1", "fp8-blocks")],
)
def test_quantised_weights(family, kind, tmp_path, make_engine, run):
    """Experts are dequantised; other layers compute with the packed weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96} if kind == "awq" else {}  # whole groups
    model = save(family, tmp_path / "model", **FAMILIES[family], **sizes)
    write_quantized(tmp_path / "model", tmp_path / "packed", CASES[kind])
    dense = type(model).from_pretrained(tmp_path / "packed" / "dense", attn_implementation="eager").eval()
    jobs = [(prompt, GREEDY) for prompt in PROMPTS]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    for speculative in (None, drafts):
        options = {"model": str(tmp_path / "packed"), "model_impl": "transformers", "speculative_config": speculative}
        engine = make_engine(**options)
        assert engine.info.quantization.startswith(CASES[kind].config["quant_method"].split("-")[0])
        for (prompt, _), outcome in zip(jobs, run(engine, jobs), strict=True):
            if CASES[kind].rounds_inputs:
                assert len(outcome.token_ids) == GREEDY.max_tokens
            else:
                check_text(dense, prompt, outcome)


def test_dynamic_rope_is_plain_within_its_context(tmp_path, make_engine, run):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = save("Olmo", tmp_path, **FAMILIES["Olmo"], rope_parameters=rope)
    engine = make_engine(model=str(tmp_path), model_impl="transformers")
    for prompt, outcome in zip(PROMPTS, run(engine, [(prompt, GREEDY) for prompt in PROMPTS]), strict=True):
        check_text(model, prompt, outcome)


def test_llama_through_transformers_has_native_text_and_drafts(models, make_engine, run, plain_tokens, jobs, greedy):
    work = jobs(greedy, adapters=True)
    options = {"enable_lora": True, "max_lora_rank": 8, "speculative_config": models.speculative("eagle3", 3)}
    native, ours = (run(make_engine(**options, model_impl=impl), work) for impl in ("native", "transformers"))
    assert [outcome.token_ids for outcome in ours] == plain_tokens(work)
    assert [outcome.accepted for outcome in ours] == [outcome.accepted for outcome in native]


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("Bloom", {}, "0 of its 2 layers"),
        ("Falcon", {}, "its attention is its own"),
        ("Mamba", {}, "state-space"),
        ("NemotronH", {"layers_block_type": ["mamba", "attention"]}, "state-space"),  # its file has an infinity
        ("OPT", {"num_key_value_heads": 4}, "has no attribute 'decoder'"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "convolutions"),
        ("DiffLlama", {}, "once each"),
        ("VaultGemma", {"head_dim": 12}, "ScaledWordEmbedding"),
        ("DeepseekV2", {"n_routed_experts": 4, "num_experts_per_tok": 1}, "different sizes"),
    ],
)
def test_refused_by_name(family, config, reason, tmp_path):
    import transformers

    made = getattr(transformers, f"{family}Config")(**{**SIZES, **config})
    made.architectures = [f"{family}ForCausalLM"]
    made.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{family}ForCausalLM.*{reason}"):
        read_facts(tmp_path, impl="transformers")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("BertForMaskedLM", "Bert"), ("BertLMHeadModel", "Bert"), ("T5ForConditionalGeneration", "T5")],
)
def test_encoders_are_refused_by_name(architecture, kind, tmp_path):
    import transformers

    made = getattr(transformers, f"{kind}Config")(**SIZES)
    made.architectures = [architecture]
    made.save_pretrained(tmp_path)
    for impl in ("auto", "transformers"):
        with pytest.raises(UnsupportedModelError, match=f"unsupported architecture: {architecture}"):
            read_facts(tmp_path, impl=impl)


def test_incompatible_options(models, tmp_path):
    with pytest.raises(InvalidRequestError, match="batch_invariant"):
        load_model(models.target, options=ModelOptions("transformers"), batch_invariant=True)
    raw = json.loads((models.target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["MyOwnForCausalLM"]}))
    for impl in ("auto", "native", "transformers"):
        with pytest.raises(
            UnsupportedModelError, match=r"MyOwnForCausalLM; supported are .*LlamaForCausalLM.*model_impl"
        ):
            read_facts(tmp_path, impl=impl)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "other"}))
    assert read_facts(tmp_path).architecture == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModelError, match=r"transformers has no LlamaForCausalLM of model_type 'other'"):
        read_facts(tmp_path, impl="transformers")


def test_a_config_does_not_choose_code_or_the_form_of_outputs(models, tmp_path, make_engine, run):
    raw = json.loads((models.target / "config.json").read_text())
    odd = {"return_dict": False, "output_hidden_states": True, "output_attentions": True, "torchscript": True}
    odd |= {"attn_implementation": "some/kernel", "experts_implementation": "some/kernel"}
    odd |= {"auto_map": {"AutoConfig": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **odd}))
    (tmp_path / "model.safetensors").symlink_to(models.target / "model.safetensors")
    folders = models.target, tmp_path
    found = [run(make_engine(model=str(f), model_impl="transformers"), [(PROMPT, GREEDY, None)])[0] for f in folders]
    assert found[0].token_ids == found[1].token_ids


def test_two_threads_import_transformers(repo_root):
    """As in a new process, in which one reads the config and one the tokenizer: modules were half imported. At the
    root, since transformers could take the folder `kernels` for an optional library of that name."""
    code = """if True:
        import sys, torch
        from concurrent.futures import ThreadPoolExecutor
        from outrider.models.checkpoint.loader import read_facts
        from outrider.models.demo import demo_model_path
        from outrider.platform.client.engine_factory import import_text_side
        from outrider.platform.core.config import EngineArgs
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(1) as other:
            found = other.submit(import_text_side, EngineArgs(model="x"))
            read_facts(demo_model_path(), impl="transformers")
            found.result()
        from transformers import AutoTokenizer, LlamaForCausalLM"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repo_root)


def test_a_deleted_model_frees_its_weights(tmp_path):
    save("Helium", tmp_path)

    def num_layers_alive():
        gc.collect()
        return sum(isinstance(found, Linear) for found in gc.get_objects())

    before = num_layers_alive()
    for _ in range(2):
        model = load_model(tmp_path)
        assert num_layers_alive() > before
        del model
    assert num_layers_alive() == before


def test_checkpoints_without_prefix_and_damaged_ones(tmp_path):
    from safetensors.torch import load_file, save_file

    save("Starcoder2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}, file)
    assert load_model(tmp_path).num_parameters == sum(tensor.numel() for tensor in tensors.values())
    del tensors["layers.1.self_attn.o_proj.weight"]
    save_file({**tensors, "odd": torch.zeros(1)}, file)
    with pytest.raises(InvalidRequestError, match=r"missing: model.layers.1.self_attn.o_proj.weight; unexpected: odd"):
        load_model(tmp_path)
