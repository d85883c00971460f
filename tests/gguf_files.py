"""GGUF files as llama.cpp's converter would write them, made of folders that transformers has saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

NAMES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
         "Qwen3ForCausalLM": "qwen3", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3"}  # fmt: skip
Chosen = Callable[[str], Type]


def write_gguf(
    folder: Path,
    file: Path,
    choose: Chosen = lambda name: Type.F32,
    tokenizer: Path | None = None,
    **more: object,
) -> dict[str, Tensor]:
    """Write the model of `folder` to `file`, matrices in the type that `choose` names for them.

    Args:
        tokenizer: Folder of the tokenizer, if not `folder`.
        more: Further fields; `__` stands for a dot.

    Returns:
        The tensors that it now holds, by their names in the folder.
    """
    config = json.loads((folder / "config.json").read_text())
    name = NAMES[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta(config["rope_parameters"]))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    tokenizer = tokenizer or folder
    if name.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    for cap, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(cap) is not None:
            add(config[cap])
    if (tokenizer / "tokenizer.json").is_file():
        add_tokenizer(writer, tokenizer)
    for key, value in more.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(key.replace("__", "."), value)
    architecture = next(key for key, theirs in gguf.MODEL_ARCH_NAMES.items() if theirs == name)
    table = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    held = {}
    for full, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("gemma") and full.endswith("norm.weight"):
            tensor = tensor + 1
        kind = choose(full) if tensor.ndim > 1 else Type.F32
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        rotated = next((heads[part] for part in heads if part in full), 0) if name == "llama" else 0
        ours = neighbours(tensor, rotated).float().numpy() if rotated else tensor.float().numpy()
        values = gguf.quantize(ours, kind)
        writer.add_tensor(table.get_name(full, (".weight", ".bias")), values, raw_dtype=kind)
        rounded = torch.from_numpy(np.array(gguf.dequantize(values, kind))).reshape(tensor.shape)
        held[full] = halves(rounded, rotated) if rotated else rounded
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def rope_theta(rope: dict) -> float:
    """Base of the rotation, of layers without a window where they differ."""
    return rope.get("full_attention", rope)["rope_theta"]


def neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows ordered for a rotation of neighbours, as llama.cpp rotates Llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows ordered for a rotation of halves, as transformers rotates."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Byte-level tokenizer of tokenizer.json, its special tokens and the template beside it."""
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
