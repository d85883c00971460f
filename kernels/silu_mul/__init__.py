"""SwiGLU's activation (Shazeer 2020): silu(gate) · up."""

from .torch import silu_mul

__all__ = ["silu_mul"]
