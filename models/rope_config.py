"""Config of the rotary position embedding, from the forms in which a HF `config.json` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .config_values import MOST, number, positive, shown, wrong
from .families import FamilyTraits

ROPE_TYPES = ("default", "proportional", "linear", "dynamic", "yarn", "longrope", "llama3")
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""Types by other names. M-RoPE (Qwen2-VL) gives each token three positions, which are equal for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding."""

    rope_type: str
    """One of ROPE_TYPES, or "none": no rotation."""
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
    """[R / 2] divisors of the frequencies in the original context; used by "longrope"."""
    long_factor: tuple[float, ...] = ()
    """[R / 2] divisors beyond the original context, and in all of a prompt that is longer; used by "longrope"."""
    rotary_dim: int | None = None
    """Elements of a head that are rotated, from its first on (R); None: all."""
    interleaved: bool = False
    """True: neighbours are rotated as pairs; False: an element and the one R / 2 after it."""
    proportion: float = 1.0
    """Part of the frequencies that are not 0, the fastest ones; used by "proportional"."""
    head_dim: int | None = None
    """Elements of a head if layers differ in it; None: the model's."""

    @property
    def short_context(self) -> int | None:
        """Most tokens of a prompt that is rotated with the short factors; None: all prompts are rotated alike."""
        return int(self.original_max_position_embeddings) if self.rope_type == "longrope" else None


def layer_ropes(
    values: Mapping[str, Any], head_dim: int, types: Sequence[str], traits: FamilyTraits
) -> tuple[RopeConfig, ...]:
    """Rotation of each layer; `types` are their kinds of attention."""
    field = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    given = values.get(field, {})
    local = {"rope_theta": values.get("rope_local_base_freq", values.get("rope_theta", 10000.0))}
    is_nested = traits.local_rope and isinstance(given, dict) and "full_attention" in given
    usual, sliding = (given["full_attention"] or {}, given.get("sliding_attention")) if is_nested else (given, local)
    rope = rope_config(values, usual, head_dim, traits)
    older = values.get("rope_scaling")
    if field == "rope_parameters" and older and older != traits.defaults.get("rope_scaling"):
        _check_older(values, usual, rope, head_dim, traits)
    ropes = [rope] * len(types)
    if traits.local_rope:
        sliding = {**local, **sliding} if isinstance(sliding, dict) else sliding or local
        flat = rope_config(values, sliding, head_dim, traits)
        ropes = [flat if kind == "sliding_attention" else rope for kind in types]
    if traits.window_rope and "sliding_window" in values and "sliding_attention" in types:
        none = replace(rope, rope_type="none")
        ropes = [rope if kind == "sliding_attention" else none for kind in types]
    if traits.no_rope:
        none = replace(rope, rope_type="none")
        ropes = [rope if kept else none for kept in rotated_layers(values, len(types))]
    return tuple(ropes)


def query_scaling(values: Mapping[str, Any]) -> tuple[float, float] | None:
    """See `DecoderConfig`."""
    field = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    given, names = values.get(field), ("llama_4_scaling_beta", "original_max_position_embeddings")
    if not isinstance(given, dict) or not given.get(names[0]):
        return None
    beta, length = (number(field, name, given.get(name)) for name in names)
    return beta, length


def _check_older(
    values: Mapping[str, Any], given: Mapping[str, Any], rope: RopeConfig, head_dim: int, traits: FamilyTraits
) -> None:
    """Refuse a `rope_scaling` in addition to `rope_parameters`, `given`, whose rotation differs from its `rope`."""
    older = values["rope_scaling"]
    if isinstance(older, dict):
        kind = older.get("rope_type", older.get("type", "default"))
        if rope_config(values, {**given, **older, "rope_type": kind}, head_dim, traits) == rope:
            return
    raise wrong("rope_scaling", "does not agree with rope_parameters; one of the two has to go")


def rotated_layers(values: Mapping[str, Any], num_layers: int) -> list[bool]:
    """True for each layer that rotates (SmolLM3)."""
    given = values.get("no_rope_layers")  # which lists the layers that have it
    if given is None:
        interval = positive(values, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers:
        raise wrong("no_rope_layers", f"must be a list of {num_layers} numbers, got {shown(given)}")
    return [bool(kept) for kept in given[:num_layers]]


def _rotary_dim(values: Mapping[str, Any], given: Mapping[str, Any], head_dim: int, traits: FamilyTraits) -> int | None:
    """Elements of a head that are rotated; None: all."""
    factor = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if factor == 1.0:
        return None
    if not traits.partial_rotary:
        raise wrong("partial_rotary_factor", "other than 1 is not supported")
    size = int(head_dim * number("partial_rotary_factor", "", factor))
    if size % 2 or not 0 < size < head_dim:
        raise wrong("partial_rotary_factor", f"{factor} rotates {size} of {head_dim} elements, which are no pairs")
    return size


def rope_config(values: Mapping[str, Any], given: object, head_dim: int, traits: FamilyTraits) -> RopeConfig:
    """Config of one rotation from an object `given` in `rope_parameters` (transformers 5), or from `rope_theta` and an
    object in `rope_scaling`."""
    field = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise wrong(field, "must be one flat object for all layers")
    # `type` is the key's old name.
    rope_type = given.get("rope_type", given.get("type", "default"))
    rope_type = _OTHER_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    served = [kind for kind in ROPE_TYPES if kind != "proportional" or traits.varied is not None]
    if rope_type not in served:
        raise wrong(field, f"of type {shown(rope_type)} is not supported; supported are {', '.join(served)}")
    is_proportional = rope_type == "proportional"
    rotary_dim = None if is_proportional else _rotary_dim(values, given, head_dim, traits)
    original = "original_max_position_embeddings"
    # It stands there in configs of Phi 3's form, and counts wherever all layers have one rotation.
    if original in values and not traits.local_rope:
        given = {**given, original: values[original]}
    numbers = {"theta": given.get("rope_theta", values.get("rope_theta", 10000.0))}
    for name in _ROPE_FIELDS.get(rope_type, ()):
        if given.get(name) is None:
            raise wrong(field, f"of type {rope_type!r} lacks {name}")
        numbers[name] = given[name]
    numbers |= {name: given[name] for name in _OPTIONAL_ROPE_FIELDS.get(rope_type, ()) if given.get(name)}
    read: dict[str, Any] = {name: number(field, name, value) for name, value in numbers.items()}
    if rope_type == "yarn":
        scales = read.pop("mscale", None), read.pop("mscale_all_dim", None)
        read.setdefault("attention_factor", _yarn_attention_factor(read["factor"], *scales))
        read["truncate"] = given.get("truncate") is not False
    if is_proportional:
        read["proportion"] = min(read.pop("partial_rotary_factor", 1.0), 1.0)
    if rope_type == "longrope":
        original = read["original_max_position_embeddings"]
        if original < 2:
            raise wrong(field, f"of type 'longrope' has original_max_position_embeddings {original:g}, below 2")
        read.setdefault("factor", positive(values, "max_position_embeddings") / original)
        read.setdefault("attention_factor", math.sqrt(1 + math.log(max(read["factor"], 1.0)) / math.log(original)))
        read |= {
            name: _divisors(field, name, given.get(name), rotary_dim or head_dim)
            for name in ("short_factor", "long_factor")
        }
    return RopeConfig(rope_type=rope_type, rotary_dim=rotary_dim, interleaved=traits.interleaved_rope, **read)


_ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OPTIONAL_ROPE_FIELDS = {
    "proportional": ("factor", "partial_rotary_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}


def _divisors(field: str, name: str, value: object, head_dim: int) -> tuple[float, ...]:
    """`value` as a divisor for each frequency."""
    if not isinstance(value, list) or len(value) != head_dim // 2:
        raise wrong(field, f"{name} must be a list of {head_dim // 2} numbers, got {shown(value)}")
    return tuple(number(field, name, divisor) for divisor in value)


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Scale of queries and keys (YaRN, Peng et al. 2023, section 3.4), from DeepSeek's two scales if given."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def context_length(num_positions: int, rope: RopeConfig, traits: FamilyTraits) -> int:
    """Context length in tokens.

    config.json has the scaled number for "llama3" and "longrope", the unscaled one for "linear" (Gemma 3 has the scaled
    one), and either for "yarn", whose scaling also has the unscaled one. For "dynamic" it is the unscaled one:
    beyond it each token would change all keys.
    """
    if rope.rope_type == "linear" and not traits.local_rope:
        reach = num_positions * rope.factor
    elif rope.rope_type == "yarn":
        reach = rope.original_max_position_embeddings * rope.factor
    else:
        return num_positions
    return max(1, int(min(reach, MOST["max_position_embeddings"])))
