"""Config of the layers with experts, read from a HF `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_values import number, positive, shown, wrong
from .families.traits import ExpertTraits

MAX_EXPERTS = 1 << 16
"""Most experts of all layers together; Kimi K2 has 23,424. Each takes kilobytes before its weights are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Experts of a decoder (Shazeer et al. 2017): a router weighs them, and a token visits the `top_k` best."""

    traits: ExpertTraits
    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner size of an expert."""
    shared_size: int | None
    """Inner size of the experts, as one, that every token visits; None: there is none."""
    activation: str
    """Activation of an expert."""
    renormalised: bool
    """True: the weights of a token's experts are divided by their sum."""
    corrected: bool = False
    """True: the family's `correction` is added to the scores for the choice."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    num_groups: int = 1
    """Groups of experts, one after another; a token visits experts of its best `top_groups` groups alone."""
    top_groups: int = 1
    layers: frozenset[int]
    """Layers with experts; the others have a dense MLP."""


def read_experts(
    values: Mapping[str, Any], traits: ExpertTraits | None, num_layers: int, activation: str
) -> ExpertConfig | None:
    """The experts of a model with `num_layers` layers, whose MLPs have an `activation`; None: it has none.

    Raises:
        UnsupportedModelError: a wrong value; `param` names the field.
    """
    key = "num_local_experts" if "num_local_experts" in values else "num_experts"  # some versions rename it
    if traits is None or values.get("num_local_experts") == 0:
        return None
    num_experts, top_k = positive(values, key), positive(values, "num_experts_per_tok")
    if num_layers * num_experts > MAX_EXPERTS:
        raise wrong(key, f"{num_experts} in each of {num_layers} layers are more than {MAX_EXPERTS}")
    if top_k > num_experts:
        raise wrong("num_experts_per_tok", f"{top_k} exceeds {key} {num_experts}")
    step = positive(values, "decoder_sparse_step", 1)
    dense_layers = _dense_layers(values, num_layers)
    shared_size = positive(values, "shared_expert_intermediate_size") if traits.shared else None
    if traits.shared_size is not None:
        shared_size = positive(values, traits.shared_size)
    if traits.ungated and _count(values, "n_shared_experts"):
        shared_size = positive(values, traits.intermediate_size) * positive(values, "n_shared_experts")
    return ExpertConfig(
        traits=traits,
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive(values, traits.intermediate_size),
        shared_size=shared_size,
        activation=traits.activation or activation,
        renormalised=bool(values.get("norm_topk_prob", False)) if traits.renormalised is None else traits.renormalised,
        corrected=traits.correction is not None and bool(values.get(traits.correction_switch or "", True)),
        layers=frozenset(i for i in range(num_layers) if i not in dense_layers and (i + 1) % step == 0),
        **(_groups(values, num_experts, top_k, traits) if traits.grouped else {}),
    )


def _dense_layers(values: Mapping[str, Any], num_layers: int) -> set[int]:
    """Layers without experts by the lists and counts that files have."""
    types = values.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= {"dense", "sparse"}:
            raise wrong("mlp_layer_types", f'must be a list of {num_layers} "dense" or "sparse", got {shown(types)}')
        return {index for index, kind in enumerate(types) if kind == "dense"}
    dense = values.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise wrong("mlp_only_layers", f"must be a list of layers, got {shown(dense)}")
    return {*dense, *range(_count(values, "first_k_dense_replace"))}


def _count(values: Mapping[str, Any], field: str) -> int:
    """The field as a number of things, of which there may be none."""
    return 0 if values.get(field, 0) == 0 else positive(values, field)


def _groups(values: Mapping[str, Any], num_experts: int, top_k: int, traits: ExpertTraits) -> dict[str, Any]:
    """Groups of experts, and the factor of their weights, by their fields in ExpertConfig."""
    found: dict[str, Any] = {"scale": number("routed_scaling_factor", "", values.get("routed_scaling_factor", 1.0))}
    method = values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise wrong("topk_method", f"{shown(method)} is not supported")
    if method == "greedy" and not traits.sigmoid:
        return found
    num_groups, top_groups = positive(values, "n_group"), positive(values, "topk_group")
    size = num_experts // num_groups
    if num_experts % num_groups or (traits.sigmoid and size < 2):
        raise wrong("n_group", f"{num_groups} does not divide {num_experts} experts in groups of at least 2")
    if top_groups > num_groups or top_groups * size < top_k:
        raise wrong("topk_group", f"{top_groups} of {num_groups} groups do not have {top_k} experts")
    return found | {"num_groups": num_groups, "top_groups": top_groups}
