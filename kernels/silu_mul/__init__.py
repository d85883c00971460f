"""SwiGLU's activation (Shazeer 2020): silu(gate) · up."""

from .torch import silu_mul, silu_mul_invariant

__all__ = ["silu_mul", "silu_mul_invariant"]
