"""Blocks of the GPT shape: LayerNorm, mostly an MLP without a gate, and names of their own. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Layers of a family that are not of Llama's shape. All names are those of the checkpoint's modules."""

    layers: str = "model.layers"
    """Name of the list of layers; the next five are within a layer."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Projections of queries, keys and values, or one merged projection."""
    out: str = "self_attn.o_proj"
    """Output projection of attention."""
    mlp: tuple[str, str] | None = None
    """Projections up and down of an MLP without a gate; None: Llama's gated MLP."""
    norm_bias: bool = True
    """True: norms have biases."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norm of attention, and norm of the MLP; one for both if the two are computed in parallel."""
    embedding: str = "model.embed_tokens"
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    head_bias: bool = False
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
    parallel: bool = False
    """True: the MLP reads what attention reads, and both are added at once."""
    by_head: bool = False
    """True: the merged projection has, for each KV head, its queries, its key and its value side by side."""
    num_kv_heads: int | None = None
    """KV heads of each layer; None: by the config's `num_key_value_heads`."""
