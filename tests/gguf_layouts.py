"""Changes of llama.cpp's converter that are more than a new name: order of rows, and tensors in parts.

Each function returns the parts of a tensor by their names in the file, and a function that joins them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch
from torch import Tensor

from . import gguf_hybrids

Parts = tuple[dict[str, Tensor], Callable[..., Tensor]]


def queries_keys_values(full: str, tensor: Tensor, config: dict[str, Any]) -> Parts:
    """Falcon and GPT-NeoX: rows of each KV head become all queries, all keys, all values."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_kv_heads", 1) if "num_kv_heads" in config else heads
    if config.get("multi_query") and not config["new_decoder_architecture"]:
        kv_heads = 1
    group = heads // kv_heads + 2
    by_head = tensor.unflatten(0, (kv_heads, group, -1))
    q, k, v = by_head[:, :-2].flatten(0, 2), by_head[:, -2].flatten(0, 1), by_head[:, -1].flatten(0, 1)

    def join(merged: Tensor) -> Tensor:
        parts = merged.split([len(q), len(k), len(v)])
        return torch.cat([part.unflatten(0, (kv_heads, -1, by_head.shape[2])) for part in parts], 1).flatten(0, 2)

    layer = full.split(".")[2]
    return {f"blk.{layer}.attn_qkv.{full.rpartition('.')[2]}": torch.cat((q, k, v))}, join


def gpt_oss_experts(full: str, tensor: Tensor, config: dict[str, Any]) -> Parts:
    """Weights [E, in, out] are transposed; gate and up, which alternate, are two tensors."""
    leaf = full.rpartition(".")[2]
    kind = "bias" if leaf.endswith("_bias") else "weight"
    stored = tensor.mT if kind == "weight" else tensor
    layer = full.split(".")[2]
    names = [f"blk.{layer}.ffn_{part}_exps.{kind}" for part in ("gate", "up", "down")]
    back = (lambda x: x.mT) if kind == "weight" else (lambda x: x)
    if leaf.startswith("down"):
        return {names[2]: stored}, back
    halves = dict(zip(names, (stored[:, ::2], stored[:, 1::2]), strict=False))
    return halves, lambda gate, up: back(torch.stack((gate, up), 2).flatten(1, 2))


def deepseek_heads(full: str, tensor: Tensor, config: dict[str, Any]) -> Parts:
    """kv_b_proj: transposed weights of keys, and those of values."""
    keys, values = tensor.unflatten(0, (config["num_attention_heads"], -1)).split(
        [config["qk_nope_head_dim"], config["v_head_dim"]], 1
    )
    layer = full.split(".")[2]
    names = [f"blk.{layer}.attn_{part}_b.weight" for part in "kv"]
    return dict(zip(names, (keys.mT, values), strict=True)), lambda k, v: torch.cat((k.mT, v), 1).flatten(0, 1)


def one_name(name: str) -> Callable[[str, Tensor, dict[str, Any]], Parts]:
    """A tensor whose name in the file the package does not map."""
    return lambda full, tensor, config: ({f"blk.{full.split('.')[2]}.{name}": tensor}, lambda x: x)


LAYOUTS: dict[tuple[str, str], Callable[[str, Tensor, dict[str, Any]], Parts]] = {
    ("falcon", "query_key_value"): queries_keys_values,
    ("gptneox", "query_key_value"): queries_keys_values,
    ("gpt-oss", ".experts."): gpt_oss_experts,
    ("gpt-oss", ".sinks"): one_name("attn_sinks.weight"),
    ("deepseek2", ".kv_b_proj."): deepseek_heads,
    ("deepseek2", "e_score_correction_bias"): one_name("exp_probs_b.bias"),
    **gguf_hybrids.LAYOUTS,
}
"""Functions by architecture and a part of the tensor's name."""


def find_layout(name: str, full: str) -> Callable[[str, Tensor, dict[str, Any]], Parts] | None:
    """The change of a tensor, if there is one."""
    return next((layout for (family, part), layout in LAYOUTS.items() if family == name and part in full), None)


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Numbers of experts that newer families state, and of layers without some."""
    for keys, add in (
        (("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), writer.add_leading_dense_block_count),
        (("n_shared_experts", "moe_num_shared_experts"), writer.add_expert_shared_count),
        (("moe_intermediate_size",), writer.add_expert_feed_forward_length),
        (("routed_scaling_factor",), writer.add_expert_weights_scale),
        (("moe_layer_interval",), writer.add_interleave_moe_layer_step),
    ):
        for value in (config[key] for key in keys if config.get(key) is not None):
            add(value)


def add_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of latent attention, groups of experts, and the scale of YaRN."""
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    is_v3 = config["architectures"] == ["DeepseekV3ForCausalLM"]
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
