"""Layers of experts: parity of logits with transformers, in every layout of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.checkpoint.mxfp4 import dequantized
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

SPARSE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 3}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen3": ("Qwen3Moe", {**SPARSE, "head_dim": 12, "norm_topk_prob": True}),
    "qwen3-dense-layers": ("Qwen3Moe", {**SPARSE, "head_dim": 12, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen3-window": (
        "Qwen3Moe",
        {
            **{**SPARSE, "head_dim": 12, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9},
            "max_window_layers": 2,  # which the family does not read
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "gpt-oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 8}),
    "qwen2": ("Qwen2Moe", {**SPARSE, "shared_expert_intermediate_size": 40}),
    "qwen2-gelu": ("Qwen2Moe", {**SPARSE, "shared_expert_intermediate_size": 40, "hidden_act": "gelu"}),
}
LATENT = {
    **{"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"num_hidden_layers": 3, "num_key_value_heads": 4, "n_shared_experts": 1},
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
CASES |= {
    "deepseek2": ("DeepseekV2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek2-bias": ("DeepseekV2", {**LATENT, "attention_bias": True}),
    "deepseek3": ("DeepseekV3", {**LATENT, **GROUPS}),
    "deepseek3-gelu": ("DeepseekV3", {**LATENT, **GROUPS, "hidden_act": "gelu_new"}),
    "deepseek3-plain": ("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
}
PROMPTS = {0: list(range(3, 40)), 1: [7], 2: list(range(90, 60, -2)), 3: list(range(5, 130, 3))}


def compute_logits(run: Callable, chunk: int) -> dict[int, torch.Tensor]:
    """Logits of all prompts, `chunk` tokens of each in a step."""
    parts: dict[int, list[torch.Tensor]] = {row: [] for row in PROMPTS}
    for start in range(0, max(map(len, PROMPTS.values())), chunk):
        chunks = {row: prompt[start : start + chunk] for row, prompt in PROMPTS.items() if start < len(prompt)}
        for row, logits in run.forward_once(chunks).items():
            parts[row].append(logits)
    return {row: torch.cat(part) for row, part in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_in_both_layouts(
    case: str, save_tiny: Callable, driver: Callable, tmp_path: Path
) -> None:
    family, config = CASES[case]
    path, reference = save_tiny(family, **config)
    with torch.no_grad():
        expected = {row: reference(torch.tensor([prompt])).logits[0] for row, prompt in PROMPTS.items()}
    reference.save_pretrained(tmp_path / "merged", save_original_format=False)
    for folder in (path, tmp_path / "merged"):
        for chunk in (1, 16, 1000):
            for row, logits in compute_logits(driver(load_model(folder)), chunk).items():
                torch.testing.assert_close(logits, expected[row], atol=1e-4, rtol=0, msg=f"{folder}, {chunk}, {row}")


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3"])
def test_bfloat16_is_as_close_to_float32_as_transformers(family: str, save_tiny: Callable, driver: Callable) -> None:
    path, reference = save_tiny(family, dtype=torch.bfloat16, **dict(CASES.values())[family])
    exact = type(reference).from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        theirs, exactly = reference(tokens).logits[0].float(), exact(tokens).logits[0]
    ours = compute_logits(driver(load_model(path)), 1000)[3]
    # Not the mean: a token whose experts change with a rounding is far off, here or there.
    assert (ours - exactly).abs().median() < 1.2 * (theirs - exactly).abs().median()


def test_experts_stored_as_mxfp4(save_tiny: Callable, driver: Callable, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 3}
    path, reference = save_tiny("GptOss", **sizes, num_experts_per_tok=2)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        experts = reference.model.layers[layer].mlp.experts
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, (3, rows, columns // 32), dtype=torch.uint8)
            getattr(experts, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[3]])).logits[0]
    got = compute_logits(driver(load_model(tmp_path)), 1000)[3]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    for name in (f"{key}_scales", f"{key}_blocks"):
        save_file({k: tensor for k, tensor in tensors.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(InvalidRequestError, match=f"missing: .*unexpected: {key}_"):
            load_model(tmp_path)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match="must be uint8"):
        load_model(tmp_path)


def test_every_mxfp4_number_is_that_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).expand(-1, 32, -1)
    scales = torch.arange(512).div(2, rounding_mode="floor").clamp(max=254).to(torch.uint8).view(16, 32)
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T
        assert torch.equal(dequantized(blocks, scales, dtype), expected)


def test_a_token_of_latent_attention_is_cached_once(save_tiny: Callable) -> None:
    path, _ = save_tiny("DeepseekV2", **LATENT)
    assert read_facts(path).kv_bytes_per_token == 3 * (24 + 8) * 4
    assert sum(spec.num_elements for spec in load_model(path).kv_layers) == 3 * (24 + 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_group", 3), ("topk_group", 5), ("topk_method", "best"), ("qk_rope_head_dim", 7), ("kv_lora_rank", 0),
        ("norm_topk_prob", True), ("moe_layer_freq", 2), ("routed_scaling_factor", -1.0),
    ],
)  # fmt: skip
def test_a_config_of_deepseek_with_wrong_values_is_refused(
    save_tiny: Callable, tmp_path: Path, field: str, value: object
) -> None:
    path, _ = save_tiny("DeepseekV2", **LATENT, **GROUPS, topk_method="group_limited_greedy")
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_facts(tmp_path)
    assert caught.value.param == field


def test_a_config_with_wrong_experts_is_refused(save_tiny: Callable, tmp_path: Path) -> None:
    path, _ = save_tiny("Qwen3Moe", **CASES["qwen3"][1])
    raw = json.loads((path / "config.json").read_text())
    for field, value in (
        ("num_experts_per_tok", 7),
        ("num_local_experts", 1 << 20),
        ("mlp_only_layers", ["all"]),
        ("clip_qkv", 8.0),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
        with pytest.raises(UnsupportedModelError) as caught:
            load_model(tmp_path)
        assert caught.value.param == field


def test_experts_of_all_layers_are_bounded(save_tiny):
    folder, _ = save_tiny("Mixtral", num_local_experts=2, num_experts_per_tok=1)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"num_local_experts": 4096, "num_hidden_layers": 64}))
    with pytest.raises(UnsupportedModelError, match="4096 in each of 64 layers are more than 65536"):
        load_model(folder)
