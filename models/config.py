"""Frozen config of a decoder, read from a HF `config.json` once and checked there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..platform.core.errors import UnsupportedModelError
from .config_values import MOST
from .config_values import number as _number
from .config_values import positive as _positive
from .config_values import shown as _shown
from .config_values import wrong as _wrong
from .expert_config import ExpertConfig, read_experts
from .families import FAMILIES, FamilyTraits, supported_architectures

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding."""

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: float = 8192.0
    """Context length before the scaling; used by "llama3", "yarn" and "longrope"."""
    low_freq_factor: float = 1.0
    """Bound of the smooth band; used by "llama3", as `high_freq_factor`."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """Turns in the original context above which a dimension keeps its frequency; used by "yarn"."""
    beta_slow: float = 1.0
    """Turns in the original context below which a dimension's frequency is divided by the factor; used by "yarn"."""
    truncate: bool = True
    """True: both bounds are rounded to whole dimensions; used by "yarn"."""
    attention_factor: float = 1.0
    """Factor of cosines and sines; used by "yarn" and "longrope"."""
    short_factor: tuple[float, ...] = ()
    """[D / 2] divisors of the frequencies in the original context; used by "longrope"."""
    long_factor: tuple[float, ...] = ()
    """[D / 2] divisors beyond the original context, and in all of a prompt that is longer; used by "longrope"."""

    @property
    def short_context(self) -> int | None:
        """Most tokens of a prompt that is rotated with the short factors; None: all prompts are rotated alike."""
        return int(self.original_max_position_embeddings) if self.rope_type == "longrope" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Decoder of the Llama shape; families differ in these fields only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Context length in tokens: config.json's, times the factor of a linear or YaRN rope scaling."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer: a query sees itself and the window - 1 positions before; None: everything."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True: queries and keys of each head are normalised before the rotation."""
    dtype: torch.dtype
    """Dtype of weights, activations and KV."""
    experts: ExpertConfig | None = None
    """Experts of the layers that have some."""
    batch_invariant: bool = False
    """True: each result for a row is, bit for bit, independent of the other rows of its step; on a CPU only."""

    @property
    def sliding_window(self) -> int | None:
        """The window when all layers have the same one; None when some layer sees everything."""
        distinct = set(self.windows)
        return distinct.pop() if len(distinct) == 1 else None


def named_architectures(raw: Mapping[str, Any]) -> list[str]:
    """Names in the `architectures` of a config.json; an absent list, or null, names none.

    Raises:
        UnsupportedModelError: it is no list of names.
    """
    named = raw.get("architectures")
    if named is None:
        return []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise _wrong("architectures", f"must be a list of names, got {_shown(named)}")
    return named


def stored_dtype(raw: Mapping[str, Any]) -> str:
    """Dtype that config.json names; "float32" when it names none.

    Raises:
        UnsupportedModelError: it is none of DTYPES.
    """
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}", param="dtype"
        )
    return name


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The first supported architecture that a HF config names.

    Raises:
        UnsupportedModelError: it names none, or its `architectures` are no list of names; the message lists the
            supported ones.
    """
    named = named_architectures(raw)
    for name in named:
        if name in FAMILIES:
            return name
    what = ", ".join(named) or f"none (model_type {raw.get('model_type')!r})"
    raise UnsupportedModelError(
        f"unsupported architecture: {what}; supported are {', '.join(supported_architectures())}", param="model"
    )


def config_from_hf(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """The config of a model that runs in `dtype`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture or one of its fields is not supported; `param` names the field.
    """
    architecture = architecture_of(raw)
    return decoder_config(raw, architecture, dtype, FAMILIES[architecture])


def decoder_config(
    raw: Mapping[str, Any], architecture: str, dtype: torch.dtype, traits: FamilyTraits
) -> DecoderConfig:
    """Config of a decoder from a HF config; a pure function.

    Raises:
        UnsupportedModelError: something this decoder does not do, or a wrong value; `param` names the field.
    """
    # A key with null counts as absent, but the family's default is for absent keys only: null means no window, and as
    # many KV heads as heads.
    values = {key: value for key, value in {**traits.defaults, **raw}.items() if value is not None}
    _refuse_unsupported(values)
    hidden_size = _positive(values, "hidden_size")
    num_heads = _positive(values, "num_attention_heads")
    num_kv_heads = _positive(values, "num_key_value_heads", num_heads)
    head_dim = _positive(values, "head_dim", hidden_size // num_heads)
    num_layers = _positive(values, "num_hidden_layers")
    if num_heads % num_kv_heads:
        raise _wrong("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        raise _wrong("head_dim", f"{head_dim} is odd, rotary embeddings need pairs")
    rope = _rope_config(values, head_dim)
    from_file = bool(values.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_positive(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_context_length(_positive(values, "max_position_embeddings"), rope),
        rms_norm_eps=_number("rms_norm_eps", "", values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        windows=_windows(values, num_layers, traits),
        qkv_bias=from_file if traits.attention_bias is None else traits.attention_bias,
        o_bias=from_file if traits.attention_bias is None else False,
        mlp_bias=bool(values.get("mlp_bias", False)) if traits.mlp_bias is None else traits.mlp_bias,
        qk_norm=traits.qk_norm,
        experts=None if traits.experts is None else read_experts(values, traits.experts, num_layers),
        dtype=dtype,
    )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise _wrong("hidden_act", f"{_shown(activation)} is not supported; supported is silu")
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise _wrong(
            "quantization_config", f"({_shown(method)}) is not supported: quantized checkpoints cannot be served"
        )


def _rope_config(values: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Config of the rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    field = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    given = values.get(field, {})
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise _wrong(field, "must be one flat object for all layers")
    # `type` is the key's old name.
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise _wrong(field, f"of type {_shown(rope_type)} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _wrong("partial_rotary_factor", "other than 1 is not supported")
    if values.get("original_max_position_embeddings") is not None:  # it stands there in configs of Phi 3's form
        given = {**given, "original_max_position_embeddings": values["original_max_position_embeddings"]}
    numbers = {"theta": given.get("rope_theta", values.get("rope_theta", 10000.0))}
    for name in _ROPE_FIELDS.get(rope_type, ()):
        if given.get(name) is None:
            raise _wrong(field, f"of type {rope_type!r} lacks {name}")
        numbers[name] = given[name]
    numbers |= {name: given[name] for name in _OPTIONAL_ROPE_FIELDS.get(rope_type, ()) if given.get(name)}
    read: dict[str, Any] = {name: _number(field, name, value) for name, value in numbers.items()}
    if rope_type == "yarn":
        scales = read.pop("mscale", None), read.pop("mscale_all_dim", None)
        read.setdefault("attention_factor", _yarn_attention_factor(read["factor"], *scales))
        read["truncate"] = given.get("truncate") is not False
    if rope_type == "longrope":
        original = read["original_max_position_embeddings"]
        if original < 2:
            raise _wrong(field, f"of type 'longrope' has original_max_position_embeddings {original:g}, below 2")
        read.setdefault("factor", _positive(values, "max_position_embeddings") / original)
        read.setdefault("attention_factor", math.sqrt(1 + math.log(max(read["factor"], 1.0)) / math.log(original)))
        read |= {name: _divisors(field, name, given.get(name), head_dim) for name in ("short_factor", "long_factor")}
    return RopeConfig(rope_type=rope_type, **read)


_ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OPTIONAL_ROPE_FIELDS = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}


def _divisors(field: str, name: str, value: object, head_dim: int) -> tuple[float, ...]:
    """`value` as a divisor for each frequency."""
    if not isinstance(value, list) or len(value) != head_dim // 2:
        raise _wrong(field, f"{name} must be a list of {head_dim // 2} numbers, got {_shown(value)}")
    return tuple(_number(field, name, divisor) for divisor in value)


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Scale of queries and keys (YaRN, Peng et al. 2023, section 3.4), from DeepSeek's two scales if given."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _context_length(num_positions: int, rope: RopeConfig) -> int:
    """Context length in tokens.

    config.json has the scaled number for "llama3" and "longrope", the unscaled one for "linear", and either for "yarn",
    whose scaling has the unscaled one beside it. For "dynamic" it is the unscaled one: beyond it each token would
    change all keys.
    """
    if rope.rope_type == "linear":
        reach = num_positions * rope.factor
    elif rope.rope_type == "yarn":
        reach = rope.original_max_position_embeddings * rope.factor
    else:
        return num_positions
    return max(1, int(min(reach, MOST["max_position_embeddings"])))


def _windows(values: Mapping[str, Any], num_layers: int, traits: FamilyTraits) -> tuple[int | None, ...]:
    if not traits.has_window or "sliding_window" not in values:
        return (None,) * num_layers
    if not traits.window_switch:
        return (_positive(values, "sliding_window"),) * num_layers
    window = _positive(values, "sliding_window") if values.get("use_sliding_window", False) else None
    first = values.get("max_window_layers", num_layers)
    if isinstance(first, bool) or not isinstance(first, int):
        raise _wrong("max_window_layers", f"must be an integer, got {_shown(first)}")
    types = values.get("layer_types")
    if types is None:
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list):
        raise _wrong("layer_types", f"must be a list, got {_shown(types)}")
    if len(types) != num_layers:
        raise _wrong("layer_types", f"has {len(types)} entries for {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise _wrong(
                "layer_types", f"{_shown(name)} is not supported; known are full_attention and sliding_attention"
            )
    return tuple(window if name == "sliding_attention" else None for name in types)
