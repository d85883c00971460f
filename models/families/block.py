"""Blocks of the GPT shape: LayerNorm, an MLP without a gate, and the checkpoint's own names. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Layers of a family that are not of Llama's shape. All names are those of the checkpoint's modules."""

    layers: str
    """Name of the list of layers; the next six are within a layer."""
    qkv: tuple[str, ...]
    """One merged projection, or those of queries, keys and values."""
    out: str
    """Output projection of attention."""
    up: str
    down: str
    norms: tuple[str, str]
    """Norm of attention, and norm of the MLP."""
    embedding: str
    final_norm: str | None
    embedding_size: int | None = None
    """Elements of an embedding; None: as many as a hidden state has."""
    projections: str = ""
    """Prefix of `project_in` and `project_out`, between embeddings and hidden states of different sizes."""
    positions: str | None = None
    """Learned position embeddings; None: the rotary ones of the config."""
    position_offset: int = 0
    """Rows of that table before position 0."""
    transposed: bool = False
    """True: weights of linear layers are stored as [in, out]."""
    norm_first: bool = True
    """True: attention and MLP read the norm of the residual stream. False: the norm follows each sum."""
