"""Mamba-2 (Dao, Gu 2024, "Transformers are SSMs"): layers of one mixer, without attention and without an MLP; and the
options of such mixers in other families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config_values import number, positive, shown, wrong
from .state_layers import Mamba2, kernel_size
from .traits import FamilyTraits, NormNames

KEYS = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state_dim": "state_size",
    "kernel": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "in_bias": "use_bias",
    "out_bias": "use_bias",
    "activation": "hidden_act",
}
"""Key of config.json for each field of `Mamba2`, and for the activation of its convolution."""
BAMBA_KEYS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
    "kernel": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "in_bias": "mamba_proj_bias",
    "out_bias": "mamba_proj_bias",
    "activation": "hidden_act",
}
BAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
SINGLE_NORM = NormNames(before_attention="norm", before_mlp=None)
"""Norm of layers with one mixer."""
_LENGTH = 1 << 18
"""Context length in tokens, since config.json has none: that on which Mamba-Codestral was evaluated."""


def mamba2(values: Mapping[str, Any], layers: frozenset[int], keys: Mapping[str, str], **others: Any) -> Mamba2 | None:
    """Mixers of `layers` by the family's `keys`, and `others` of their fields; None: no layer has one.

    Raises:
        UnsupportedModelError: a wrong value.
    """
    if not layers:
        return None
    if values.get(keys["activation"], "silu") not in ("silu", "swish"):
        raise wrong(keys["activation"], f"{shown(values[keys['activation']])} is not supported; supported is silu")
    heads, groups = positive(values, keys["heads"]), positive(values, keys["groups"])
    if heads % groups:
        raise wrong(keys["groups"], f"{groups} does not divide {keys['heads']} {heads}")
    options: dict[str, Any] = {name: bool(values[keys[name]]) for name in ("conv_bias", "in_bias", "out_bias")}
    found = Mamba2(
        layers=layers,
        kernel=kernel_size(values, keys["kernel"]),
        heads=heads,
        head_dim=positive(values, keys["head_dim"]),
        groups=groups,
        state_dim=positive(values, keys["state_dim"]),
        **{"time_step_limit": _time_step_limit(values), **options, **others},
    )
    if found.size > 1 << 24:
        raise wrong(keys["heads"], f"{heads} of {found.head_dim} elements are too many")
    return found


def _time_step_limit(values: Mapping[str, Any]) -> tuple[float, float]:
    """Smallest and largest time step; transformers 5 writes infinity as an object."""
    given = values.get("time_step_limit", [0.0, math.inf])
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise wrong("time_step_limit", f"must be a list of two numbers, got {shown(given)}")
    limits = []
    for value in given:
        text = value.get("__float__") if isinstance(value, dict) else value
        if text in ("Infinity", math.inf):
            limits.append(math.inf)
        else:
            limits.append(0.0 if text == 0 else number("time_step_limit", "", value))
    return limits[0], limits[1]


def bamba_sizes(values: Mapping[str, Any], inner: int | None = None) -> dict[str, Any]:
    """Elements of a head, if config.json leaves them to `inner`, the elements of all heads.

    Raises:
        UnsupportedModelError: the heads do not have `inner` elements.
    """
    if inner is None:
        inner = positive(values, "mamba_expand") * positive(values, "hidden_size")
    heads, size = positive(values, "mamba_n_heads"), values["mamba_d_head"]
    found = inner // heads if size == "auto" else positive(values, "mamba_d_head")
    if found * heads != inner:
        raise wrong("mamba_n_heads", f"{heads} heads of {found} elements are not the {inner} of the model")
    return {"mamba_d_head": found}


def unrotated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a model without rotary embeddings."""
    return {"no_rope_layers": [0] * positive(values, "num_hidden_layers")}


def _single_mixers(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of the layers of a model that has mixers alone."""
    return ("mamba",) * positive(values, "num_hidden_layers")


def _states(values: Mapping[str, Any]) -> Mamba2 | None:
    layers = frozenset(range(positive(values, "num_hidden_layers")))
    return mamba2(values, layers, KEYS, float_residual=bool(values["residual_in_fp32"]))


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    inner, heads = positive(values, "expand") * positive(values, "hidden_size"), positive(values, "num_heads")
    if heads * positive(values, "head_dim") != inner:
        raise wrong("num_heads", f"{heads} heads of {values['head_dim']} elements are not the {inner} of the model")
    return unrotated(values) | {"intermediate_size": inner}


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_attention_heads": 1,
        "max_position_embeddings": _LENGTH,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "expand": 2,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": True,
        "rms_norm_eps": 1e-5,
    },
    keys={"rms_norm_eps": "layer_norm_epsilon"},
    derived=_derived,
    names={
        "model.norm": "model.norm_f",
        "model.embed_tokens": "model.embeddings",
        "mamba": "mixer",
    },
    norms=SINGLE_NORM,
    attention_bias=False,
    mlp_bias=False,
    no_rope=True,
    has_window=False,
    mixers=_single_mixers,
    states=_states,
)
