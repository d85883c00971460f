"""Weighted sums of adapters. A mix is an adapter like any other: its rows are those of its parts, one after another.

A = [A_1; A_2; ...]    B = [w_1 B_1; w_2 B_2; ...]    so that x A^T B = sum of w_i x A_i^T B_i
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from ..adapter import DRAFT_LOADED, Adapter
from ..device.layout import LoraWeights, PackedModules
from ..files.errors import adapter_error


def check_mixable(name: str, adapter: Adapter) -> None:
    """Refuse (AdapterError) a part that scales base weights (DoRA) or replaces some: a weight does not scale its
    effect."""
    if adapter.target.gains or adapter.drafter.gains:
        raise adapter_error(
            f"adapter '{name}' uses DoRA: it can neither be mixed with others nor have a weight other than 1"
        )
    if adapter.target.invocation:
        raise adapter_error(
            f"adapter '{name}' has alora_invocation_tokens: it can neither be mixed with others nor have a "
            "weight other than 1"
        )
    if adapter.target.own_rows:
        raise adapter_error(
            f"adapter '{name}' brings rows of {' and '.join(adapter.target.own_rows)} of its own: it can neither be "
            "mixed with others nor have a weight other than 1"
        )


def mix_adapters(parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Make the adapter of the weighted sum of `parts`; each is an adapter and its weight.

    A module has the rows of all parts that adapt it, so its rank is the sum of their ranks. Other parts cost nothing
    there. The same holds for the drafter's modules; parts without draft weights do not change the drafts. The result
    does not depend on the order of the parts, bit for bit.
    """
    parts = sorted(parts, key=lambda part: (part[0].digest, part[1]))
    digest = hashlib.sha256(b"mix")
    for adapter, weight in parts:
        digest.update(adapter.digest + struct.pack("<d", weight))
    drafter = _mix_modules([(adapter.drafter, weight) for adapter, weight in parts])
    return Adapter(
        digest.digest(),
        _mix_modules([(adapter.target, weight) for adapter, weight in parts]),
        drafter,
        DRAFT_LOADED if drafter.rank else next((adapter.draft for adapter, _ in parts if adapter.draft), ""),
    )


def _mix_modules(parts: Sequence[tuple[PackedModules, float]]) -> PackedModules:
    """Copy the parts' rows: the parts may leave memory before the mix does."""
    found: dict[str, list[tuple[LoraWeights, float]]] = {}
    for packed, weight in parts:
        for name, weights in packed.modules().items():
            found.setdefault(name, []).append((weights, weight))
    biases: dict[str, torch.Tensor] = {}
    for packed, weight in parts:
        for name, bias in packed.biases.items():
            biases[name] = biases.get(name, 0) + weight * bias
    modules = {
        name: LoraWeights(
            torch.cat([part.a for part, _ in rows]), torch.cat([part.b * weight for part, weight in rows])
        )
        for name, rows in found.items()
    }
    return parts[0][0].layout.pack(modules)._replace(biases=biases)
