"""Tables of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.rope import Rotation
from ..config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angles of one position: [D / 2] float32.

    "linear" divides all by the factor (kaiokendev 2023). "llama3" divides those whose wavelength exceeds the original
    context, keeps the short ones, and changes smoothly between (Llama 3.1's reference code). "yarn" does so by
    dimension (Peng et al. 2023, section 3.2). "dynamic" divides none within the original context.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        context = config.original_max_position_embeddings
        low, high = config.low_freq_factor, config.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        smooth = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / config.factor + smooth * frequencies
    if config.rope_type == "yarn":
        slow, fast = _yarn_bounds(config, head_dim)
        divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - fast) / (slow - fast)).clamp(0.0, 1.0)
        return divided * frequencies / config.factor + (1 - divided) * frequencies
    return frequencies


def _yarn_bounds(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Dimensions that turn `beta_slow` and `beta_fast` times in the original context."""

    def dimension(turns: float) -> float:
        context = config.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    fast, slow = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, head_dim - 1)
    return slow + 0.001 * (slow == fast), fast


class RotaryEmbedding:
    """Cosines and sines of positions, computed in float32; the tables grow when a longer sequence comes."""

    def __init__(self, config: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, head_dim)
        self._scale = config.attention_factor
        self._dtype = dtype
        self._device = device
        self._table = self._compute(2048)
        self._cos, self._sin = self._table.split(1, dim=1)

    def rotation(self, positions: Tensor, end: int, *, gathers: bool = True) -> Rotation:
        """Rotation of `positions` [T], all below `end`. Without `gathers` it holds tables of all positions."""
        if end > self._table.shape[0]:
            self._table = self._compute(1 << (end - 1).bit_length())
            self._cos, self._sin = self._table.split(1, dim=1)
        if not gathers:
            return Rotation(self._cos, self._sin, positions)
        cos, sin = self._table.index_select(0, positions).split(1, dim=1)
        return Rotation(cos, sin)

    def _compute(self, count: int) -> Tensor:
        """Table [count, 2, D]: cosines, and sines with the first half negated."""
        angles = torch.outer(torch.arange(count, dtype=torch.float32), self._frequencies)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return table.to(self._device, self._dtype)
