"""Facts about models with recurrent states that GGUF files have in no other way. See `gguf_families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...platform.core.errors import UnsupportedModelError

Values = Mapping[str, Any]
"""Values of a file by their keys, without the name of the architecture before them."""
Facts = dict[str, Any]
"""Keys of a config.json."""

FOLDED = "factors_in_weights"
"""Key in place of factors that are in the weights."""
_LENGTH = 1 << 18
"""Context length of Mamba-2 in tokens, as without a GGUF file: llama.cpp's converter writes an arbitrary number."""


def has_tensor(tensors: Mapping[str, Any], ending: str) -> bool:
    """True if a layer has the tensor."""
    return any(name.endswith(ending) for name in tensors)


def predicted(values: Values) -> Facts:
    """Number of layers. Those that predict further tokens are counted among the others in a file."""
    extra = values.get("nextn_predict_layers", 0)
    return {"num_hidden_layers": values["block_count"] - extra, "num_nextn_predict_layers": extra}


def _experts(values: Values) -> Facts:
    keys = {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    return {theirs: values[ours] for ours, theirs in keys.items() if ours in values}


def delta_net(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Qwen3-Next and Qwen3.5."""
    heads = values["ssm.time_step_rank"]
    return {
        **_experts(values),
        **predicted(values),
        "full_attention_interval": values.get("full_attention_interval", 4),
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
        "linear_num_key_heads": values["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": values["ssm.state_size"],
        "linear_value_head_dim": values["ssm.inner_size"] // heads,
    }


def mamba2(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Mamba-2 itself, which has neither attention nor MLPs."""
    heads, inner = values["ssm.time_step_rank"], values["ssm.inner_size"]
    return {
        "max_position_embeddings": _LENGTH,
        "intermediate_size": inner,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // values["embedding_length"],
        "state_size": values["ssm.state_size"],
        "n_groups": values["ssm.group_count"],
        "conv_kernel": values["ssm.conv_kernel"],
        "use_conv_bias": has_tensor(tensors, "ssm_conv1d.bias"),
        "use_bias": has_tensor(tensors, "ssm_in.bias"),
    }


def _mixers(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Mixers with the names of Bamba's config.json."""
    heads, inner = values["ssm.time_step_rank"], values["ssm.inner_size"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": values["ssm.state_size"],
        "mamba_n_groups": values["ssm.group_count"],
        "mamba_d_conv": values["ssm.conv_kernel"],
        "mamba_conv_bias": has_tensor(tensors, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(tensors, "ssm_in.bias"),
    }


def _kv_heads(values: Values) -> list[int]:
    """KV heads of each layer; 0: it has no attention."""
    found = values["attention.head_count_kv"]
    if not isinstance(found, list) or len(found) != values["block_count"]:
        raise UnsupportedModelError("the file does not state the KV heads of each layer", param="model")
    return found


def granite_hybrid(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Granite 4, and Bamba, whose attention rotates."""
    heads = _kv_heads(values)
    attending = [index for index, count in enumerate(heads) if count]
    found = _mixers(values, tensors) | {
        "mamba_expand": values["ssm.inner_size"] // values["embedding_length"],
        "num_key_value_heads": max(heads),
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "head_dim": values["embedding_length"] // values["attention.head_count"],
    }
    if values.get("rope.scaling.finetuned"):
        return found | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": attending}
    shared = values.get("expert_shared_feed_forward_length", values.get("feed_forward_length"))
    return found | {"shared_intermediate_size": shared, "num_local_experts": values.get("expert_count", 0)}


def falcon_h1(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Falcon-H1, whose factors are in the weights."""
    return _mixers(values, tensors) | {
        FOLDED: True,
        "mamba_d_ssm": values["ssm.inner_size"],
        "mamba_rms_norm": has_tensor(tensors, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has_tensor(tensors, "ssm_out.bias"),
    }


_NEMOTRON_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
}
"""Keys of Nemotron-H's config.json by those of a file."""


def nemotron_h(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Nemotron-H: a layer without KV heads and without an MLP has a mixer."""
    layers = predicted(values)
    count, sizes = layers["num_hidden_layers"], values["feed_forward_length"]
    kinds = []
    for index, (attends, size) in enumerate(zip(_kv_heads(values)[:count], sizes[:count], strict=True)):
        second = "moe" if f"blk.{index}.ffn_gate_inp.weight" in tensors else "mlp"
        kinds.append("attention" if attends else second if size else "mamba")
    heads, inner = values["ssm.time_step_rank"], values["ssm.inner_size"]
    return {theirs: values[ours] for ours, theirs in _NEMOTRON_KEYS.items() if ours in values} | {
        **layers,
        "layers_block_type": kinds,
        "num_key_value_heads": max(_kv_heads(values)),
        "intermediate_size": max(sizes),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": values["ssm.group_count"],
        "ssm_state_size": values["ssm.state_size"],
        "conv_kernel": values["ssm.conv_kernel"],
        "use_conv_bias": has_tensor(tensors, "ssm_conv1d.bias"),
        "use_bias": has_tensor(tensors, "ssm_in.bias"),
        "mlp_bias": False,
    }
