"""Sizes of the models that kernels are tuned for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class ModelShape(NamedTuple):
    """Sizes of a decoder that kernels depend on."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_name: str = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        import torch

        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def projections(self) -> list[tuple[int, tuple[int, ...]]]:
        """(inputs, outputs of each slice) of a layer's projections, as adapters see them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, (queries, keys, keys)),
            (queries, (self.hidden,)),
            (self.hidden, (self.inner, self.inner)),
            (self.inner, (self.hidden,)),
        ]


MODELS = {
    "llama3-8b": ModelShape(4096, 14336, 32, 8, 128, 128256),
    "llama3-70b": ModelShape(8192, 28672, 64, 8, 128, 128256),
    "qwen3-0.6b": ModelShape(1024, 3072, 16, 8, 128, 151936),
    "qwen3-8b": ModelShape(4096, 12288, 32, 8, 128, 151936),
    "qwen2.5-7b": ModelShape(3584, 18944, 28, 4, 128, 152064),
    "mistral-7b": ModelShape(4096, 14336, 32, 8, 128, 32768),
}
"""Sizes of published models."""


class WorkSizes(NamedTuple):
    """Amounts of work for each kernel."""

    decodes: tuple[tuple[int, int], ...] = ((1, 32768), (16, 4096), (64, 2048))
    """(rows, tokens of context) of decodes and verifications."""
    prompts: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048))
    """(rows, tokens): prompts whose last chunk is computed."""
    chunk: int = 2048
    """Most tokens of a prompt that are computed in a step."""
    queries: tuple[int, ...] = (1, 4, 8)
    """Query tokens of a row: 1 of decodes, more of verifications."""
    rows: tuple[int, ...] = (1, 64, 2048)
    """Rows of norms, activations, rotations and writes."""
    logits: tuple[int, ...] = (1, 64)
    """Rows of logits."""
    decode_adapters: tuple[tuple[int, int], ...] = ((1, 1), (64, 64), (64, 4))
    """(tokens, adapters) of small steps."""
    prompt_adapters: tuple[tuple[int, int], ...] = ((2048, 1), (4096, 4))
    """(tokens, adapters) of large steps."""
    rank: int = 16
    drafts: int = 4
