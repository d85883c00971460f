"""Weighted sums of adapters. A mix is an adapter like any other: its rows are those of its parts, one after another.

A = [A_1; A_2; ...]    B = [w_1 B_1; w_2 B_2; ...]    so that x A^T B = sum of w_i x A_i^T B_i
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..adapter import LOADED, Adapter, LoraWeights
from ..files.peft_config import adapter_error


class Part(NamedTuple):
    """One adapter of a mix."""

    name: str
    adapter: Adapter
    weight: float


def mix_adapters(parts: Sequence[Part]) -> Adapter:
    """The adapter that adds the weighted sum of what `parts` add.

    A module has the rows of all parts that adapt it, so that its rank is the sum of theirs; a part that leaves a module
    alone costs nothing there. The same holds for the drafter's modules; parts without draft weights have no say in the
    drafts. The order of the parts has no influence, on no bit.

    Raises:
        AdapterError: a part scales base weights (DoRA), so that its weight is not a factor of what it adds.
    """
    for part in parts:
        if any(w.gain is not None for w in (*part.adapter.modules.values(), *part.adapter.draft_modules.values())):
            raise adapter_error(
                f"adapter '{part.name}' uses DoRA: it can neither be mixed with others nor have a weight other than 1"
            )
    parts = sorted(parts, key=lambda part: (part.adapter.digest, part.weight))
    digest = hashlib.sha256(b"mix")
    for part in parts:
        digest.update(part.adapter.digest + struct.pack("<d", part.weight))
    modules = _mix_modules([(part.adapter.modules, part.weight) for part in parts])
    draft_modules = _mix_modules([(part.adapter.draft_modules, part.weight) for part in parts])
    everything = (*modules.values(), *draft_modules.values())
    return Adapter(
        digest.digest(),
        max(len(weights.a) for weights in everything),
        modules,
        draft_modules=draft_modules,
        draft=LOADED if draft_modules else next((part.adapter.draft for part in parts if part.adapter.draft), ""),
    )


def _mix_modules(parts: Sequence[tuple[Mapping[str, LoraWeights], float]]) -> dict[str, LoraWeights]:
    names = dict.fromkeys(name for modules, _ in parts for name in modules)
    return {name: _mix_weights([(m[name], weight) for m, weight in parts if name in m]) for name in names}


def _mix_weights(parts: Sequence[tuple[LoraWeights, float]]) -> LoraWeights:
    """Contiguous copies: the parts may leave memory before the mix does."""
    return LoraWeights(
        torch.cat([weights.a for weights, _ in parts]), torch.cat([weights.b * weight for weights, weight in parts])
    )
