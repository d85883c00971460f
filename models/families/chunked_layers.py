"""Layers of which some see their chunk of positions alone, and the others all positions without a rotation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLayers:
    """Properties of these two kinds of layers."""

    rotated: frozenset[int]
    """Layers with a rotation."""
    normalised: bool
    """True: queries and keys of rotated layers are normalised, without learned weights."""
    temperature: tuple[float, float] | None
    """Scale a and floor f of the other layers' queries (Nakanishi 2025): at position p they are multiplied by
    1 + a · log(1 + floor((p + 1) / f)). None: by nothing."""
