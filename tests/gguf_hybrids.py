"""GGUF files of models with recurrent states, of Gemma 3n and 4, and of Llama 4: what llama.cpp's converter does to
their tensors, and the fields that it writes. Each layout is as in `gguf_layouts.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf
import torch
from torch import Tensor

Parts = tuple[dict[str, Tensor], Callable[..., Tensor]]
Config = dict[str, Any]


def blk(full: str, name: str) -> str:
    """Name in the file of a layer's tensor."""
    return f"blk.{full.split('.')[2]}.{name}"


def renamed(name: str) -> Callable[[str, Tensor, Config], Parts]:
    """A tensor with another name alone."""
    return lambda full, tensor, config: ({blk(full, name): tensor}, lambda x: x)


def reshaped(name: str, shape: Callable[[Tensor, Config], tuple[int, ...]]) -> Callable[[str, Tensor, Config], Parts]:
    """A tensor with another name and shape."""

    def layout(full: str, tensor: Tensor, config: Config) -> Parts:
        return {blk(full, name): tensor.reshape(shape(tensor, config))}, lambda x: x.reshape(tensor.shape)

    return layout


def decay(size: int | None = None) -> Callable[[str, Tensor, Config], Parts]:
    """A_log, of which the file has A; `size`: sizes of 1 that are added."""

    def layout(full: str, tensor: Tensor, config: Config) -> Parts:
        a = -tensor.exp()
        return {blk(full, "ssm_a"): a if size is None else a[:, None]}, lambda x: torch.log(-x).reshape(tensor.shape)

    return layout


def groups(config: Config) -> int:
    """Groups of heads of a Mamba-2 mixer."""
    return config.get("n_groups", config.get("mamba_n_groups", 1))


MAMBA = {
    "A_log": decay(1),
    "dt_bias": renamed("ssm_dt.bias"),
    ".mixer.D": reshaped("ssm_d", lambda tensor, config: (len(tensor), 1)),
    ".mamba.D": reshaped("ssm_d", lambda tensor, config: (len(tensor), 1)),
    "conv1d.weight": reshaped("ssm_conv1d.weight", lambda tensor, config: (tensor.shape[0], tensor.shape[2])),
    ".mixer.norm.weight": reshaped("ssm_norm.weight", lambda tensor, config: (groups(config), -1)),
    ".mamba.norm.weight": reshaped("ssm_norm.weight", lambda tensor, config: (groups(config), -1)),
}


def gate_and_up(suffix: str) -> Callable[[str, Tensor, Config], Parts]:
    """Two tensors of the two halves of the rows, of an MLP or of all experts."""

    def layout(full: str, tensor: Tensor, config: Config) -> Parts:
        ending = "" if suffix == "_shexp" and not config["num_local_experts"] else suffix
        names = [blk(full, f"ffn_{half}{ending}.weight") for half in ("gate", "up")]
        return dict(zip(names, tensor.chunk(2, -2), strict=True)), lambda *halves: torch.cat(halves, -2)

    return layout


def granite_down(full: str, tensor: Tensor, config: Config) -> Parts:
    """Output of the MLP that all tokens visit."""
    return renamed(f"ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight")(full, tensor, config)


def llama4_gate_and_up(full: str, tensor: Tensor, config: Config) -> Parts:
    """Weights [E, in, out] of all experts: transposed."""
    parts, join = gate_and_up("_exps")(full, tensor.mT, config)
    return parts, lambda *halves: join(*halves).mT


def llama4_down(full: str, tensor: Tensor, config: Config) -> Parts:
    """As gate and up."""
    return {blk(full, "ffn_down_exps.weight"): tensor.mT}, lambda x: x.mT


def by_kind(full: str, tensor: Tensor, config: Config) -> Parts:
    """Rows of Qwen3-Next's queries, keys, values and gates, which the checkpoint has by key head."""
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    wide = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    by_head = [part.split([size, size, wide, wide]) for part in tensor.chunk(heads)]
    q, k, v, z = (torch.cat([head[kind] for head in by_head]) for kind in range(4))

    def join(qkv: Tensor, gates: Tensor) -> Tensor:
        kinds = [*qkv.split([len(q), len(k), len(v)]), gates]
        return torch.cat([kind.chunk(heads)[head] for head in range(heads) for kind in kinds])

    return {blk(full, "attn_qkv.weight"): torch.cat((q, k, v)), blk(full, "attn_gate.weight"): z}, join


def tile(tensor: Tensor, heads: int, key_heads: int) -> Tensor:
    """Value heads of which the first of each key head come first, along the first dimension."""
    by_head = tensor.chunk(heads)
    count = heads // key_heads
    return torch.cat([by_head[key * count + index] for index in range(count) for key in range(key_heads)])


def tiled(layout: Callable[[str, Tensor, Config], Parts], dim: int = 0) -> Callable[[str, Tensor, Config], Parts]:
    """Qwen3.5: value heads along `dim` are tiled; rows of queries and keys before them stay."""

    def change(full: str, tensor: Tensor, config: Config) -> Parts:
        heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
        before = 2 * keys * config["linear_key_head_dim"] if "qkv" in full or "conv1d" in full else 0
        turned = tensor.transpose(0, dim)
        moved = torch.cat((turned[:before], tile(turned[before:], heads, keys))).transpose(0, dim)
        parts, join = layout(full, moved, config)

        def back(x: Tensor) -> Tensor:
            x = join(x).transpose(0, dim)
            return torch.cat((x[:before], tile(x[before:], heads, heads // keys))).transpose(0, dim)

        return parts, back

    return change


def scaled(name: str, factor: Callable[[Tensor, Config], Tensor | float]) -> Callable[[str, Tensor, Config], Parts]:
    """Falcon-H1: factors of config.json are multiplied into weights."""

    def layout(full: str, tensor: Tensor, config: Config) -> Parts:
        by = factor(tensor, config)
        stored = name if name.startswith(("token", "output")) else blk(full, name)
        return {stored: tensor * by}, lambda x: x / by

    return layout


def in_proj_factors(tensor: Tensor, config: Config) -> Tensor:
    """Factor of each row: gates, x, B, C, time steps."""
    state = config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = [config["mamba_d_ssm"]] * 2 + [state] * 2 + [config["mamba_n_heads"]]
    rows = [torch.full((size, 1), factor) for size, factor in zip(sizes, config["ssm_multipliers"], strict=True)]
    return torch.cat(rows) * config["ssm_in_multiplier"]


def of_key(*keys: str) -> Callable[[Tensor, Config], float]:
    """Product of numbers in config.json."""
    return lambda tensor, config: math.prod(config[key] for key in keys)


DELTA = {
    "A_log": decay(),
    "dt_bias": renamed("ssm_dt.bias"),
    "conv1d.weight": reshaped("ssm_conv1d.weight", lambda tensor, config: (tensor.shape[0], tensor.shape[2])),
}
FALCON = {
    "in_proj.weight": scaled("ssm_in.weight", in_proj_factors),
    "mamba.out_proj": scaled("ssm_out.weight", of_key("ssm_out_multiplier")),
    "q_proj": scaled("attn_q.weight", of_key("attention_in_multiplier")),
    "k_proj": scaled("attn_k.weight", of_key("attention_in_multiplier", "key_multiplier")),
    "v_proj": scaled("attn_v.weight", of_key("attention_in_multiplier")),
    "o_proj": scaled("attn_output.weight", of_key("attention_out_multiplier")),
    "gate_proj": scaled("ffn_gate.weight", lambda tensor, config: config["mlp_multipliers"][0]),
    "down_proj": scaled("ffn_down.weight", lambda tensor, config: config["mlp_multipliers"][1]),
    "embed_tokens": scaled("token_embd.weight", of_key("embedding_scale")),
    "lm_head": scaled("output.weight", of_key("lm_head_multiplier")),
}
QWEN35 = {
    **{name: tiled(layout) for name, layout in DELTA.items()},
    "in_proj_qkv": tiled(renamed("attn_qkv.weight")),
    "in_proj_z": tiled(renamed("attn_gate.weight")),
    "in_proj_b": tiled(renamed("ssm_beta.weight")),
    "in_proj_a": tiled(renamed("ssm_alpha.weight")),
    "linear_attn.out_proj": tiled(renamed("ssm_out.weight"), dim=1),
}
BY_FAMILY = {
    "mamba2": MAMBA,
    "nemotron_h": MAMBA,
    "nemotron_h_moe": MAMBA,
    "granitehybrid": {
        **MAMBA,
        "block_sparse_moe.input_linear": gate_and_up("_exps"),
        "shared_mlp.input_linear": gate_and_up("_shexp"),
        "shared_mlp.output_linear": granite_down,
    },
    "falcon-h1": {**MAMBA, **FALCON},
    "qwen3next": {**DELTA, "in_proj_qkvz": by_kind},
    "qwen35": QWEN35,
    "qwen35moe": QWEN35,
    "llama4": {"experts.gate_up_proj": llama4_gate_and_up, "experts.down_proj": llama4_down},
    "gemma4": {
        "router.scale": renamed("ffn_gate_inp.scale"),
        "per_expert_scale": renamed("ffn_down_exps.scale"),
        "layer_scalar": renamed("layer_output_scale.weight"),
        "experts.gate_up_proj": renamed("ffn_gate_up_exps.weight"),
        "experts.down_proj": renamed("ffn_down_exps.weight"),
    },
    "gemma3n": {"correct_output_scale": renamed("altup_correct_scale.weight")},
}
LAYOUTS = {(family, part): layout for family, layouts in BY_FAMILY.items() for part, layout in layouts.items()}


def completed(config: Config) -> Config:
    """A config.json with the keys that the converter reads, which transformers saves in another form."""
    config = dict(config)
    if "layers_block_type" in config:
        config["num_hidden_layers"] = len(config["layers_block_type"])
        if "moe" not in config["layers_block_type"]:
            config = {key: value for key, value in config.items() if "experts" not in key and "moe" not in key}
    if "attn_layer_indices" in config:
        attending = config["attn_layer_indices"]
        config["layer_types"] = ["attention" if i in attending else "mamba" for i in range(config["num_hidden_layers"])]
    if "per_layer_config" in config:
        full = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]
        config["global_head_dim"] = full["head_dim"]
        config["num_global_key_value_heads"] = full.get("num_key_value_heads")
    if "mamba_d_ssm" in config:
        config["embedding_scale"] = config.pop("embedding_multiplier")
    return config


def add_hybrid(writer: gguf.GGUFWriter, name: str, config: Config) -> None:
    """Fields of these families, in addition to those that all have."""
    if name in ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"):
        _add_mamba(writer, name, config)
    elif "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    elif name == "llama4":
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    elif name in ("gemma3n", "gemma4"):
        _add_gemma(writer, name, config)


def _add_mamba(writer: gguf.GGUFWriter, name: str, config: Config) -> None:
    def value(*keys: str) -> Any:
        return next(config[key] for key in keys if key in config)

    heads = value("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = heads * value("mamba_d_head", "mamba_head_dim", "head_dim")
    writer.add_ssm_conv_kernel(value("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(value("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(groups(config))
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    if name == "mamba2":
        writer.add_context_length(1 << 20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    elif name != "falcon-h1":
        kinds = config["layers_block_type"] if "layers_block_type" in config else config["layer_types"]
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads if kind in ("attention", "full_attention") else 0 for kind in kinds])
        if name == "granitehybrid":
            writer.add_rope_scaling_finetuned(config["architectures"] == ["BambaForCausalLM"])
            if "shared_intermediate_size" in config:
                writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        else:
            inner = config["moe_intermediate_size" if name == "nemotron_h_moe" else "intermediate_size"]
            writer.add_feed_forward_length([inner if kind in ("moe", "mlp") else 0 for kind in kinds])
            if name == "nemotron_h_moe":
                writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
                writer.add_expert_weights_norm(config["norm_topk_prob"])
                writer.add_expert_group_count(config["n_group"])


def _add_gemma(writer: gguf.GGUFWriter, name: str, config: Config) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if name == "gemma3n":
        normal = torch.distributions.Normal(0.0, 1.0)
        bounds = normal.icdf(torch.tensor(config["activation_sparsity_pattern"]))
        writer.add_activation_sparsity_scale(bounds.tolist())
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_altup_active_idx(config["altup_active_idx"])
        return
    kinds, kv_heads = config["layer_types"], config["num_key_value_heads"]
    wide, full = config["global_head_dim"], config["rope_parameters"]["full_attention"]
    writer.add_key_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    if config["num_global_key_value_heads"] is not None:
        counts = {"sliding_attention": kv_heads, "full_attention": config["num_global_key_value_heads"]}
        writer.add_head_count_kv([counts[kind] for kind in kinds])
    if config["use_double_wide_mlp"]:
        first = len(kinds) - config["num_kv_shared_layers"]
        inner = config["intermediate_size"]
        writer.add_feed_forward_length([inner if index < first else 2 * inner for index in range(len(kinds))])
    if config["enable_moe_block"]:
        writer.add_expert_used_count(config["top_k_experts"])
    rotated = int(wide * full["partial_rotary_factor"] / 2)
    divisors = torch.cat((torch.ones(rotated), torch.full((wide // 2 - rotated,), 1e30)))
    writer.add_tensor("rope_freqs.weight", divisors.numpy())
