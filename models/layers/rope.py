"""Tables of the rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.rope import Rotation
from ..rope_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angles of one position: [D / 2] float32; for "longrope" [2, D / 2], those of short texts and of long ones.

    "linear" divides all by the factor (kaiokendev 2023). "llama3" divides those whose wavelength exceeds the original
    context, keeps the short ones, and changes smoothly between (Llama 3.1's reference code). "yarn" does so by
    dimension (Peng et al. 2023, section 3.2). "longrope" has a divisor for each dimension (Ding et al. 2024).
    "dynamic" divides none within the original context. "proportional" divides all, and turns the fastest alone (Gemma
    Team 2026). "none" turns nothing.
    """
    if config.rope_type == "none":
        return torch.zeros(head_dim // 2)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if config.rope_type == "longrope":
        return 1.0 / (torch.tensor([config.short_factor, config.long_factor]) * config.theta**exponents)
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "proportional":
        frequencies[int(config.proportion * head_dim // 2) :] = 0.0
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
    """Cosines and sines of positions, computed in float32; the table grows when a longer sequence comes.

    A model whose layers are rotated in different ways has several rotations, which lie side by side in one table. Each
    has cosines, and sines with the first half negated.

    LongRoPE turns a token with the long factors when its prompt is longer than the short context, or its position is
    beyond it. So a text that grows beyond the short context keeps its earlier keys, as with transformers.
    """

    def __init__(
        self, configs: Sequence[RopeConfig], head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create the rotations of `configs`; a head has `head_dim` elements unless they state another size."""
        contexts = {config.short_context for config in configs} - {None}
        assert len(contexts) <= 1, "rotations change at one length of a prompt"
        self.short_context = contexts.pop() if contexts else None
        """See `RopeConfig.short_context`."""
        sizes = [config.rotary_dim or config.head_dim or head_dim for config in configs]
        each = [inverse_frequencies(config, size) for config, size in zip(configs, sizes, strict=True)]
        num_rows = 1 if self.short_context is None else 2
        self._frequencies = [f.expand(num_rows, -1) for f in each]
        self._scales = [config.attention_factor for config in configs]
        self._widths = [size for size in sizes for _ in ("cos", "sin")]
        self._dtype = dtype
        self._device = device
        self._table = self._compute(2048)
        self._parts = self._table.split(self._widths, dim=2)

    def rotations(
        self, positions: Tensor, end: int, in_long_prompt: Tensor | None = None, *, gathers: bool = True
    ) -> tuple[Rotation, ...]:
        """Rotation of `positions` [T], all below `end`, for each config. Without `gathers` it holds tables of all
        positions.

        Args:
            in_long_prompt: [T] bool: tokens of prompts longer than the short context; None: there is none.
        """
        rows = positions
        if self.short_context is not None:
            is_long = positions >= self.short_context
            rows = 2 * positions + (is_long if in_long_prompt is None else is_long | in_long_prompt)
            end *= 2
        if end > self._table.shape[0]:
            self._table = self._compute(1 << (end - 1).bit_length())
            self._parts = self._table.split(self._widths, dim=2)
        if not gathers:
            parts = self._parts
            return tuple(Rotation(parts[i], parts[i + 1], rows) for i in range(0, len(parts), 2))
        parts = self._table.index_select(0, rows).split(self._widths, dim=2)
        return tuple(Rotation(parts[i], parts[i + 1]) for i in range(0, len(parts), 2))

    def _compute(self, count: int) -> Tensor:
        """Table [count, 1, W] of all rotations. LongRoPE has two rows for each position: short and long."""
        columns: list[Tensor] = []
        for frequencies, scale in zip(self._frequencies, self._scales, strict=True):
            rows, pairs = frequencies.shape
            positions = torch.arange(count // rows, dtype=torch.float32)
            angles = torch.outer(positions, frequencies.flatten()).view(count, pairs)
            cos, sin = angles.cos() * scale, angles.sin() * scale
            columns += [cos, cos, -sin, sin]
        return torch.cat(columns, 1).unsqueeze(1).to(self._device, self._dtype)
