"""GGUF files as llama.cpp's converter would write them, made of folders that transformers has saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from .gguf_hybrids import add_hybrid, completed
from .gguf_layouts import add_deepseek, add_experts, find_layout

NAMES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
         "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen2MoeForCausalLM": "qwen2moe",
         "Qwen3MoeForCausalLM": "qwen3moe", "OlmoeForCausalLM": "olmoe", "Olmo2ForCausalLM": "olmo2",
         "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "Phi3ForCausalLM": "phi3",
         "GraniteForCausalLM": "granite", "Glm4ForCausalLM": "glm4", "SmolLM3ForCausalLM": "smollm3",
         "StableLmForCausalLM": "stablelm", "Starcoder2ForCausalLM": "starcoder2",
         "GPT2LMHeadModel": "gpt2", "GPTNeoXForCausalLM": "gptneox", "FalconForCausalLM": "falcon",
         "PhiForCausalLM": "phi2", "GptOssForCausalLM": "gpt-oss", "DeepseekV2ForCausalLM": "deepseek2",
         "DeepseekV3ForCausalLM": "deepseek2", "Glm4MoeForCausalLM": "glm4moe", "Lfm2ForCausalLM": "lfm2",
         "Lfm2MoeForCausalLM": "lfm2moe", "Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
         "Exaone4ForCausalLM": "exaone4", "SeedOssForCausalLM": "seed_oss", "MiniMaxM2ForCausalLM": "minimax-m2",
         "Cohere2ForCausalLM": "cohere2", "Ministral3ForCausalLM": "mistral3", "Olmo3ForCausalLM": "olmo2",
         "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe",
         "Mamba2ForCausalLM": "mamba2", "BambaForCausalLM": "granitehybrid", "FalconH1ForCausalLM": "falcon-h1",
         "GraniteMoeHybridForCausalLM": "granitehybrid", "NemotronHForCausalLM": "nemotron_h",
         "Gemma3nForCausalLM": "gemma3n", "Gemma4ForCausalLM": "gemma4", "Llama4ForCausalLM": "llama4"}  # fmt: skip
# Architectures whose rows of q and k are ordered for a rotation of neighbours.
NEIGHBOURS = {"llama", "granite", "smollm3", "mistral3", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
EXPERT = re.compile(r"(?<=\.experts|jections)\.(\d+)(?=\.)")
"""Number of an expert, or of a matrix of Gemma 3n's streams."""
HEAD = re.compile(r"\.(enorm|hnorm|eh_proj|shared_head\.\w+|(?<=\d\.)embed_tokens)\.weight$")
"""Modules of a head for multi-token prediction."""
Chosen = Callable[[str], Type]


def write_gguf(
    folder: Path,
    file: Path,
    choose: Chosen = lambda name: Type.F32,
    tokenizer: Path | None = None,
    split: int = 0,
    **more: object,
) -> dict[str, Tensor]:
    """Write the model of `folder` to `file`, matrices in the type that `choose` names for them.

    Args:
        tokenizer: Folder of the tokenizer, if not `folder`.
        split: Tensors in each of several files, whose names have numbers; 0: there is one file.
        more: Further fields; `__` stands for a dot.

    Returns:
        The tensors that it now holds, by their names in the folder.
    """
    config = completed(json.loads((folder / "config.json").read_text()))
    name = NAMES[config["architectures"][0]]
    if name == "nemotron_h" and "moe" in config["layers_block_type"]:
        name = "nemotron_h_moe"
    writer = gguf.GGUFWriter(file, name, split_max_tensors=split)
    add_sizes(writer, config)
    add_factors(writer, config)
    if name == "deepseek2":
        add_deepseek(writer, config)
    else:
        add_experts(writer, config)
    add_hybrid(writer, name, config)
    tokenizer = tokenizer or folder
    if (tokenizer / "tokenizer.json").is_file():
        add_tokenizer(writer, tokenizer)
    for key, value in more.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(key.replace("__", "."), value)
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    held, experts = {}, {}
    for full, tensor in load_file(folder / "model.safetensors").items():
        kind = choose(full) if tensor.ndim > 1 else Type.F32
        if (layout := find_layout(name, full)) is not None:
            parts, join = layout(full, tensor.float(), config)
            for part, value in parts.items():
                parts[part] = gguf.quantize(value.contiguous().numpy(), kind)
                writer.add_tensor(part, parts[part], raw_dtype=kind)
            held[full] = join(*(torch.from_numpy(np.array(gguf.dequantize(part, kind))) for part in parts.values()))
            continue
        rotated = next((heads[part] for part in heads if part in full), 0) if name in NEIGHBOURS else 0
        tensor = neighbours(tensor, rotated) if rotated else tensor
        values = gguf.quantize(changed(name, full, tensor.float()).numpy(), kind)
        if (expert := EXPERT.search(full)) is not None:
            experts.setdefault((EXPERT.sub("", full), kind), {})[int(expert[1])] = values
        else:
            writer.add_tensor(gguf_name(full, name, config), values, raw_dtype=kind)
        rounded = torch.from_numpy(np.array(gguf.dequantize(values, kind))).reshape(tensor.shape)
        rounded = rounded - 1 if is_raised(name, full) else rounded
        held[full] = halves(rounded, rotated) if rotated else rounded
    for (full, kind), parts in experts.items():
        stacked = np.stack([parts[index] for index in range(len(parts))])
        writer.add_tensor(gguf_name(full, name, config), stacked, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def gguf_name(full: str, name: str, config: dict[str, Any]) -> str:
    """Name of a tensor in the file."""
    if (head := HEAD.search(full)) is not None:
        return f"blk.{full.split('.')[2]}.nextn.{head[1].replace('.', '_')}.weight"
    full = full.replace("model.layers", "layers") if ".block_sparse_moe.experts." in full else full
    full = full.replace(".block_sparse_moe.experts.", ".feed_forward.experts.")
    if ".feed_forward.experts." in full and name != "llama4":
        full = full.removeprefix("model.")
    if ".mixer.experts." in full:
        full = full.replace(".mixer.experts.", ".mlp.experts.").replace("backbone.", "model.")
    full = full.replace("correction_bias", "correction.bias").replace(".expert_bias", ".expert_bias.bias")
    architecture = next(key for key, theirs in gguf.MODEL_ARCH_NAMES.items() if theirs == name)
    table = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or config["n_layer"])
    return table.get_name(full, (".weight", ".bias"))


def is_raised(name: str, full: str) -> bool:
    """True for the weights of norms that the model adds 1 to: the file has the sum."""
    is_norm = full.endswith("norm.weight") and not full.endswith("linear_attn.norm.weight")
    return is_norm and name in ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")


def changed(name: str, full: str, tensor: Tensor) -> Tensor:
    """Tensor with the converter's changes, those of q and k apart."""
    if is_raised(name, full):
        return tensor + 1
    if name == "gpt2" and full.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.t().contiguous()
    if full.endswith(("conv.conv.weight", "moe_statics.e_score_correction_bias")):
        return tensor.squeeze(1 if "conv" in full else 0)
    return tensor.squeeze(0) if full.endswith("shared_expert_gate.weight") else tensor


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of the model."""

    def value(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    hidden, heads = value("hidden_size", "n_embd"), value("num_attention_heads", "n_head")
    writer.add_context_length(value("max_position_embeddings", "n_positions"))
    writer.add_block_count(value("num_hidden_layers", "n_layer"))
    writer.add_embedding_length(hidden)
    is_gpt2 = "n_embd" in config
    writer.add_feed_forward_length(4 * hidden if is_gpt2 else value("ffn_hidden_size", "intermediate_size"))
    writer.add_head_count(heads)
    if not is_gpt2:
        kv_heads = value("num_kv_heads", "num_key_value_heads") or heads
        if "conv_L_cache" in config:
            kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]]
            writer.add_shortconv_l_cache(config["conv_L_cache"])
        is_multi_query = config.get("multi_query") and not config["new_decoder_architecture"]
        writer.add_head_count_kv(1 if is_multi_query else kv_heads)
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if (eps := value("rms_norm_eps", "norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(value("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"))
    is_latent = "kv_lora_rank" in config
    if config.get("head_dim") and not is_latent:
        writer.add_key_length(config["head_dim"])
    if (rope := config.get("rope_parameters")) is not None:
        rope = rope.get("full_attention", rope)
        share = rope.get("partial_rotary_factor", 1.0)
        rotated = config.get("qk_rope_head_dim") or int(share * (config.get("head_dim") or hidden // heads))
        writer.add_rope_dimension_count(rotated)
        if rope.get("rope_type") == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "llama_4_scaling_beta" in rope:
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_freq_base(rope["rope_theta"])
        for kind in ("short", "long") if rope.get("rope_type") == "longrope" else ():
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
        if rope.get("rope_type") == "longrope":
            writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if (count := value("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")) and not is_latent:
        writer.add_expert_count(count)
        writer.add_expert_used_count(value("num_experts_per_tok", "moe_k"))


def add_factors(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Numbers that some families have."""
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("sliding_window", writer.add_sliding_window),
    ):
        if config.get(key):
            add(config[key])


def neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows ordered for a rotation of neighbours, as llama.cpp rotates Llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows ordered for a rotation of halves, as transformers rotates."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Byte-level tokenizer of tokenizer.json, its special tokens and the template next to it."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    ids = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    special = {token["id"] for token in raw["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in raw["model"]["merges"]])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_add_bos_token(raw["post_processor"] is not None)
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
