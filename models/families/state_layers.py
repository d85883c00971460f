"""Layers with a recurrent state, read from a config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config_values import positive, shown, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Gated short convolutions (LFM2)."""

    layers: frozenset[int]
    """Layers that have them; the others have attention."""
    kernel: int
    """Positions that an output depends on: its own and the kernel - 1 before."""
    channels: int
    bias: bool
    """True: the convolution and both projections have biases."""

    @property
    def recurrent(self) -> tuple[int, int, int] | None:
        """Shape of the recurrent state; None: there is none."""
        return None


class DeltaNames(NamedTuple):
    """Names of a delta net's modules in the checkpoint."""

    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """Projection of queries, keys and values, or one of each."""
    gates: tuple[str, str, str] = ("in_proj_z", "in_proj_b", "in_proj_a")
    """Projections of the gate, of beta and of the decay."""
    convolutions: tuple[str, ...] = ("conv1d",)
    """One for each of `qkv`."""
    norm: str = "norm"
    out: str = "out_proj"
    module: str = "linear_attn"
    """Module of a layer that holds all of these."""
    wide_gates: tuple[str, str] | None = None
    """Projections of the results of the gate's and the decay's (Kimi Linear); None: there are none."""


QWEN_NAMES = DeltaNames()
"""Names of Qwen3.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated delta nets (Yang et al. 2024, "Gated Delta Networks")."""

    layers: frozenset[int]
    """Layers that have them; the others have attention."""
    kernel: int
    """Positions that an output of the convolution depends on."""
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: consecutive ones share a key head."""
    key_dim: int
    """Elements of a query and of a key."""
    value_dim: int
    merged: bool
    """True: the checkpoint has one projection of queries, keys, values and gates, grouped by key head (Qwen3-Next)."""
    names: DeltaNames = QWEN_NAMES
    beta_scale: float = 1.0
    """Factor of the sigmoid of beta."""
    norm_eps: float | None = None
    """Epsilon of the gated norm; None: that of all norms."""
    by_element: bool = False
    """True: Kimi Delta Attention, in which each element of a key has a decay of its own, and the gate is a sigmoid."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def recurrent(self) -> tuple[int, int, int] | None:
        """Shape of the recurrent state: [value heads, elements of a key, elements of a value]."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 mixers (Dao, Gu 2024, "Transformers are SSMs")."""

    layers: frozenset[int]
    """Layers that have them."""
    kernel: int
    """Positions that an output of the convolution depends on."""
    heads: int
    head_dim: int
    groups: int
    """Groups of consecutive heads that share B and C, and are normalised together."""
    state_dim: int
    """Elements of B and of C."""
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    time_step_limit: tuple[float, float]
    """Smallest and largest time step."""
    norm: str = "after_gate"
    """"after_gate": the gated result is normalised; "before_gate": the result is, then gated; "none": it is gated."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors of a mixer's input and of its result."""
    part_factors: tuple[float, ...] = (1.0,) * 5
    """Factors of the gate, x, B, C and the time steps."""
    float_residual: bool = False
    """True: layers add their results in float32 (Mamba-2)."""
    attention_factors: tuple[float, float] | None = None
    """Factors of the input and the result of attention in the same layer (Falcon-H1); None: it has no attention."""

    @property
    def size(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.size + 2 * self.groups * self.state_dim

    @property
    def recurrent(self) -> tuple[int, int, int] | None:
        """Shape of the recurrent state."""
        return self.heads, self.state_dim, self.head_dim


StateLayers = ShortConv | DeltaNet | Mamba2
"""Layers with states of a decoder; all have the same sizes."""


_OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Types of layers by the names that older files have."""


def state_layers(values: Mapping[str, Any], name: str, fallback: list[str], *, hybrid: bool = True) -> frozenset[int]:
    """Layers of type `name` in `layer_types`, or in `fallback` if the file has no list.

    Raises:
        UnsupportedModelError: the list is wrong, or no layer of a `hybrid` has attention.
    """
    num_layers = positive(values, "num_hidden_layers")
    types = values.get("layer_types", fallback)
    if not isinstance(types, list) or len(types) != num_layers:
        raise wrong("layer_types", f"must be a list of {num_layers} types, got {shown(types)}")
    types = [_OLD_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    for kind in types:
        if kind not in (name, "full_attention"):
            raise wrong("layer_types", f"{shown(kind)} is not supported; known are {name} and full_attention")
    found = frozenset(index for index, kind in enumerate(types) if kind == name)
    if hybrid and len(found) == num_layers:
        raise wrong("layer_types", "has no full_attention: a model without attention layers is not supported")
    return found


def delta_net(values: Mapping[str, Any], *, merged: bool) -> DeltaNet:
    """Gated delta nets of Qwen3-Next (`merged`), Qwen3.5 and OLMo Hybrid.

    Raises:
        UnsupportedModelError: a wrong value.
    """
    interval = positive(values, "full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    fallback = [kinds[(i + 1) % interval == 0] for i in range(positive(values, "num_hidden_layers"))]
    key_heads, value_heads = positive(values, "linear_num_key_heads"), positive(values, "linear_num_value_heads")
    if value_heads % key_heads:
        raise wrong("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    return DeltaNet(
        layers=state_layers(values, "linear_attention", fallback),
        kernel=kernel_size(values, "linear_conv_kernel_dim"),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=positive(values, "linear_key_head_dim"),
        value_dim=positive(values, "linear_value_head_dim"),
        merged=merged,
    )


def kernel_size(values: Mapping[str, Any], field: str) -> int:
    """Size of a convolution's kernel."""
    size = positive(values, field)
    if not 2 <= size <= 64:
        raise wrong(field, f"must be 2 to 64, got {size}")
    return size
