"""y = x Wᵀ + b (+ residual), with the weight brought once into the form that the machine reads fastest."""

from .invariant import InvariantLinear, pack_invariant
from .torch import PackedLinear, pack

__all__ = ["InvariantLinear", "PackedLinear", "pack", "pack_invariant"]
