"""Config of the layers with experts, read from a HF `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_values import positive, shown, wrong
from .families.traits import ExpertTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Experts of a decoder (Shazeer et al. 2017): a router weighs them, and a token visits the `top_k` best."""

    traits: ExpertTraits
    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner size of an expert."""
    shared_size: int | None
    """Inner size of the expert that every token visits; None: there is none."""
    renormalised: bool
    """True: the weights of a token's experts are divided by their sum."""
    layers: frozenset[int]
    """Layers with experts; the others have a dense MLP."""


def read_experts(values: Mapping[str, Any], traits: ExpertTraits, num_layers: int) -> ExpertConfig:
    """The experts of a model with `num_layers` layers.

    Raises:
        UnsupportedModelError: a wrong value; `param` names the field.
    """
    key = "num_local_experts" if "num_local_experts" in values else "num_experts"  # some versions rename it
    num_experts, top_k = positive(values, key), positive(values, "num_experts_per_tok")
    if top_k > num_experts:
        raise wrong("num_experts_per_tok", f"{top_k} exceeds {key} {num_experts}")
    step = positive(values, "decoder_sparse_step", 1)
    dense = values.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise wrong("mlp_only_layers", f"must be a list of layers, got {shown(dense)}")
    return ExpertConfig(
        traits=traits,
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive(values, traits.intermediate_size),
        shared_size=positive(values, "shared_expert_intermediate_size") if traits.shared else None,
        renormalised=bool(values.get("norm_topk_prob", False)) if traits.renormalised is None else traits.renormalised,
        layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    )
