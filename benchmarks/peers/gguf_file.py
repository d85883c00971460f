"""A Hugging Face folder of Llama's or Qwen2's shape as a GGUF file in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from outrider.models.checkpoint.json_files import read_json

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, target: Path) -> None:
    """Write `target`; its vocabulary is that of tokenizer.json, of byte-level BPE."""
    config = read_json(folder / "config.json")
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, config["model_type"])
    _describe(writer, config)
    _add_vocabulary(writer, read_json(folder / "tokenizer.json")["model"], config)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        renamed = _renamed(name)
        weight = _interleaved(weight, _num_heads(renamed, config))
        if weight.dim() == 1:
            writer.add_tensor(renamed, weight.float().numpy())
        else:
            data = weight.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(renamed, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_vocabulary(writer: gguf.GGUFWriter, model: dict[str, Any], config: dict[str, Any]) -> None:
    vocabulary = {number: token for token, number in model["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([vocabulary.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])])
    kinds = (gguf.TokenType.UNUSED, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[i in vocabulary] for i in range(config["vocab_size"])])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_eos_token_id(config.get("eos_token_id") or 0)
    writer.add_add_bos_token(False)


def _renamed(name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.{suffix}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{suffix}"


def _num_heads(name: str, config: dict[str, Any]) -> int:
    """Heads whose rows GGUF's llama interleaves; 0 for none."""
    if config["model_type"] != "llama":
        return 0
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in name else 0


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from the rotary order of halves to that of pairs."""
    if not heads:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
