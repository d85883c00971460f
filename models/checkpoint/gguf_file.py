"""GGUF files, llama.cpp's form of a model: config, tokenizer and tensors in one file, read by the package `gguf`.

Quantised tensors are dequantised one by one when they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...platform.core.errors import UnsupportedModelError
from ..families.gguf_families import GGUF_FAMILIES, GgufFamily
from .gguf_reader import open_gguf, reading
from .gguf_tensors import GgufTensors

if TYPE_CHECKING:
    from ..config import DecoderConfig
    from .weight_files import StoredTensor

SUFFIX = ".gguf"
TOKENS = "tokenizer.ggml.tokens"
"""Field with the list of all tokens in the order of their ids."""
_ARCHITECTURE = "general.architecture"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROPE_DIVISORS = "rope_freqs.weight"
_HEAD_MODULES = {"token_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head_norm"}
"""Modules of a head for multi-token prediction in a file, by their canonical names."""
_SHORT_DIVISORS, _LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"

# Keys of config.json by those of a GGUF file, in which the architecture's name precedes them.
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Keys of config.json's `rope_parameters` by those of a GGUF file.
_SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Tokens that end a sequence: of a text, of a turn, of a message that awaits a tool's result.
_ENDS = ("eos", "eot", "eom")


def is_gguf(path: str | Path) -> bool:
    """True for the path of a GGUF file, by its name; a directory may be called so too."""
    return str(path).lower().endswith(SUFFIX) and not os.path.isdir(path)


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Content of the config.json that the model of a GGUF file would have.

    Raises:
        NotFoundError: a part of a split model is missing.
        InvalidRequestError: the file is damaged, or its package is not installed.
        UnsupportedModelError: an architecture that is not served; `param` is "model".
    """
    with reading(path):
        found, tensors = open_gguf(path)
        family = _family(path, found.get(_ARCHITECTURE))
        prefix = f"{found[_ARCHITECTURE]}."
        values = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        config = {theirs: _rounded(values[ours]) for ours, theirs in _KEYS.items() if ours in values}
        has_experts, more = bool(values.get("expert_count")), family.facts(values, tensors)
        config |= _expert_sizes(values, tensors) if has_experts else {}
        if "rope.dimension_count" in values:
            if family.neighbours_rotated:
                config.setdefault("head_dim", values["rope.dimension_count"])
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            config["partial_rotary_factor"] = values["rope.dimension_count"] / head_dim
        pattern = values.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        return config | {
            "architectures": [(has_experts and family.with_experts) or family.architecture],
            "dtype": _dtype({tensor.tensor_type.name for tensor in tensors.values()}),
            "vocab_size": int(tensors[_EMBEDDING].shape[-1]),
            "tie_word_embeddings": _HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "eos_token_id": [found[key] for end in _ENDS if (key := f"tokenizer.ggml.{end}_token_id") in found],
            "rope_parameters": _rope_parameters(values, tensors, config) | more.pop("rope_parameters", {}),
            "sliding_window": config.get("sliding_window") or None,  # Phi-4 has 0
            **more,
        }


def _expert_sizes(values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Number and sizes of experts; files do not always state the sizes."""
    sizes = {"num_experts": values["expert_count"], "num_local_experts": values["expert_count"]}
    for name, key in (("exps", "moe_intermediate_size"), ("shexp", "shared_expert_intermediate_size")):
        if (tensor := tensors.get(f"blk.0.ffn_up_{name}.weight")) is not None:
            sizes[key] = int(tensor.shape[1])
    return sizes


def read_gguf(path: Path, names: Iterable[str], config: DecoderConfig) -> dict[str, StoredTensor]:
    """Tensors of a GGUF file by their names in a checkpoint of Hugging Face.

    Args:
        names: Names that the model knows; other tensors keep those of the file.
        config: Config of the model.

    Raises:
        NotFoundError: a part of a split model is missing.
        InvalidRequestError: the file is damaged, or its package is not installed.
        UnsupportedModelError: an architecture that is not served.
    """
    with reading(path):
        source = _source(path, config, range(config.num_layers, config.num_layers + config.num_extra_layers))
        found = {name: tensor for name in names if (tensor := source.find(name)) is not None}
        return found | source.rest()


def read_gguf_head(path: Path, names: Iterable[str], config: DecoderConfig, index: int) -> dict[str, StoredTensor]:
    """Tensors of the head for multi-token prediction that block `index` of a file is, by their canonical names: see
    `PredictionHead`. Empty if the file has none.

    Args:
        names: Names that the head's layer knows, as of layer 0.
        config: Config of that layer.

    Raises:
        NotFoundError, InvalidRequestError, UnsupportedModelError: see `read_gguf`.
    """
    with reading(path):
        source = _source(path, config, (), num_layers=index + 1)
        modules = {f"{ours}.weight": f"blk.{index}.nextn.{theirs}.weight" for ours, theirs in _HEAD_MODULES.items()}
        asked = modules | {name: name.replace(".layers.0.", f".layers.{index}.", 1) for name in names}
        found = {ours: tensor for ours, theirs in asked.items() if (tensor := source.find(theirs)) is not None}
        return found if set(modules) <= set(found) else {}


def _source(path: Path, config: DecoderConfig, without: Iterable[int], num_layers: int | None = None) -> GgufTensors:
    """Tensors of a file but those of the blocks `without`, and those that are parts of the config."""
    import gguf

    fields, tensors = open_gguf(path)
    architecture = fields[_ARCHITECTURE]
    family = _family(path, architecture)
    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(known, num_layers or config.num_layers)
    dropped = tuple(f"blk.{layer}." for layer in without)
    parts_of_config = {_ROPE_DIVISORS, _SHORT_DIVISORS, _LONG_DIVISORS}
    kept = {n: tensor for n, tensor in tensors.items() if n not in parts_of_config and not n.startswith(dropped)}
    return GgufTensors(path, kept, family, config, table)


def read_gguf_fields(path: Path) -> dict[str, Any]:
    """Fields of a GGUF file by their names, `TOKENS` among them.

    Raises:
        InvalidRequestError: the file is damaged, has no tokens, or its package is not installed.
    """
    with reading(path):
        found = open_gguf(path, tensors=False).fields
        if not isinstance(found.get(TOKENS), list):
            raise ValueError(f"there is no list {TOKENS}")
        return found


def _family(path: Path, architecture: object) -> GgufFamily:
    family = GGUF_FAMILIES.get(str(architecture))
    if family is None:
        raise UnsupportedModelError(
            f"{path}: unsupported architecture in a GGUF file: {str(architecture)[:80]}; "
            f"supported are {', '.join(sorted(GGUF_FAMILIES))}",
            param="model",
        )
    return family


def _dtype(types: set[str]) -> str:
    """Dtype in which a file is served unless the user says otherwise: its own, bfloat16 for quantised tensors."""
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if not types <= set(plain):
        return "bfloat16"
    return next(name for kind, name in reversed(plain.items()) if kind in types)  # norms are F32 in all files


def _rope_parameters(values: dict[str, Any], tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default"}
    if "rope.freq_base" in values:
        found["rope_theta"] = _rounded(values["rope.freq_base"])
    scaling = values.get("rope.scaling.type", "none")
    if scaling != "none":
        found["rope_type"] = scaling
        found |= {
            theirs: _rounded(values[f"rope.scaling.{ours}"])
            for ours, theirs in _SCALING_KEYS.items()
            if f"rope.scaling.{ours}" in values
        }
    if _ROPE_DIVISORS in tensors:  # of Llama 3: the same ones for all lengths
        divisors = _numbers(tensors[_ROPE_DIVISORS])
        found |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        found["original_max_position_embeddings"] = config.get("max_position_embeddings")
    if _LONG_DIVISORS in tensors:
        found |= {
            "rope_type": "longrope",
            "short_factor": _numbers(tensors[_SHORT_DIVISORS]),
            "long_factor": _numbers(tensors[_LONG_DIVISORS]),
        }
        if "rope.scaling.attn_factor" in values:
            found["attention_factor"] = values["rope.scaling.attn_factor"]
    return found


def _numbers(tensor: Any) -> list[float]:
    return [_rounded(float(value)) for value in tensor.data.flatten()]


def _rounded(value: Any) -> Any:
    """A number of 32 bits as its shortest decimal: 1e-05 is stored as 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value
