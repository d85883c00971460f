"""y = x Wᵀ + b (+ residual), with the weight brought once into the form that the machine reads fastest."""

from .torch import PackedLinear, pack

__all__ = ["PackedLinear", "pack"]
