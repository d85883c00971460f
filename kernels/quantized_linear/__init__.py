"""y = x Wᵀ + b (+ residual) for a weight that is stored as codes with scales."""

from .weight import QuantizedWeight

__all__ = ["QuantizedWeight"]
