"""y = x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang and Sennrich 2019)."""

from .torch import NormWeight, prepare, rms_norm, rms_norm_invariant

__all__ = ["NormWeight", "prepare", "rms_norm", "rms_norm_invariant"]
