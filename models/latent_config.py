"""Config of latent attention (DeepSeek-V2, DeepSeek-AI 2024, section 2.1), read from a HF `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_values import number, positive, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Attention whose keys and values are products of one vector a token, its latent."""

    query_rank: int | None
    """Size of the vector that queries are products of; None: they are of the hidden state."""
    rank: int
    """Size of the latent."""
    rope_dim: int
    """Elements of a head's query, and of the one key that all heads share, that are rotated."""
    plain_dim: int
    """Elements of a head's query and key that are not."""
    value_dim: int
    """Elements of a head's value."""

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.rope_dim + self.plain_dim

    @property
    def key_dim(self) -> int:
        """Elements of a token's cache: the rotated part of its keys, and its latent."""
        return self.rope_dim + self.rank


def read_latent(values: Mapping[str, Any]) -> LatentConfig:
    """The latent attention of a model.

    Raises:
        UnsupportedModelError: a wrong value; `param` names the field.
    """
    rope_dim, rank = positive(values, "qk_rope_head_dim"), positive(values, "kv_lora_rank")
    for field, size in (("qk_rope_head_dim", rope_dim), ("kv_lora_rank", rank)):
        if size % 2:
            raise wrong(field, f"{size} is odd")
    query_rank = positive(values, "q_lora_rank") if "q_lora_rank" in values else None
    if query_rank is None and values.get("attention_bias", False):
        raise wrong("attention_bias", "is not supported without q_lora_rank")
    return LatentConfig(
        query_rank=query_rank,
        rank=rank,
        rope_dim=rope_dim,
        plain_dim=positive(values, "qk_nope_head_dim"),
        value_dim=positive(values, "v_head_dim"),
    )


def latent_scale(values: Mapping[str, Any], latent: LatentConfig) -> float:
    """Factor of attention scores: 1 / sqrt(D), and YaRN's scale of queries and keys if `mscale_all_dim` is given."""
    field = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    given = values.get(field, {})
    scale = latent.query_dim**-0.5
    if given.get("rope_type", given.get("type", "default")) == "default" or not given.get("mscale_all_dim"):
        return scale
    factor = number(field, "factor", given.get("factor"))
    by = number(field, "mscale_all_dim", given["mscale_all_dim"])
    return scale * (1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0) ** 2
