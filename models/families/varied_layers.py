"""Layers that differ in their sizes, and in where their keys come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config_values import positive, wrong


class SideExperts(NamedTuple):
    """Experts that each token visits alongside its layer's MLP."""

    num_experts: int
    top_k: int
    intermediate_size: int


class Streams(NamedTuple):
    """Residual streams of a model (AltUp, Baykal et al. 2023), of which layers compute one and predict the others."""

    number: int
    active: int
    """Index of the one that layers compute."""
    scaled: bool
    """True: its corrected state has learned factors before the layer's own input is applied."""
    side_rank: int
    """Rank of the product alongside attention (LAuReL, Menghani et al. 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedLayers:
    """Properties of each layer of a model with normalised values. The tuples have one item for each layer."""

    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    inner_sizes: tuple[int, ...]
    """Inner size of the MLP."""
    kv_sources: tuple[int, ...]
    """Layer whose keys and values are attended to: an earlier one, or the layer itself."""
    keys_as_values: frozenset[int] = frozenset()
    """Layers that have no projection of values: these are keys, with a norm of their own."""
    input_size: int = 0
    """Elements of the input that each layer has in addition to the hidden states; 0: there is none."""
    input_vocab_size: int = 0
    """Rows of the table of these inputs."""
    scaled: bool = False
    """True: each layer's result has a learned factor."""
    experts: SideExperts | None = None
    """None: layers have an MLP alone."""
    streams: Streams | None = None
    """None: there is one residual stream."""
    sparsities: tuple[float, ...] = ()
    """Part of each MLP's gate that is cut off, if it is distributed normally; (): nothing is."""

    @property
    def owners(self) -> list[int]:
        """Layers that have keys and values of their own."""
        return [index for index, source in enumerate(self.kv_sources) if index == source]


def kv_sources(values: Mapping[str, Any], types: Sequence[str]) -> tuple[int, ...]:
    """Layer whose keys each layer reads. The last `num_kv_shared_layers` read those of the last layer of their kind
    before them; `types` are the kinds of attention."""
    if not (shared := values.get("num_kv_shared_layers", 0)):
        return tuple(range(len(types)))
    first = len(types) - positive(values, "num_kv_shared_layers")
    last = {kind: index for index, kind in enumerate(types[: max(first, 0)])}
    missing = set(types) - set(last)
    if missing:
        raise wrong("num_kv_shared_layers", f"{shared} leaves no layer of {min(missing)} with keys of its own")
    return (*range(first), *(last[kind] for kind in types[first:]))


class InputSizes(NamedTuple):
    """Sizes of the layers' own inputs; see VariedLayers."""

    size: int = 0
    vocab_size: int = 0


def input_sizes(values: Mapping[str, Any]) -> InputSizes:
    """Sizes of the layers' own inputs."""
    if not values.get("hidden_size_per_layer_input"):
        return InputSizes()
    keys = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    return InputSizes._make(positive(values, key) for key in keys)
