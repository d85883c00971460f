"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with one KV head, or as many as query heads, and weights as usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gpt2
from .block import Block


def _block(values: Mapping[str, Any]) -> Block:
    num_kv_heads = 1 if values.get("multi_query", True) else None
    return replace(gpt2.block(values), transposed=False, by_head=True, num_kv_heads=num_kv_heads)


TRAITS = replace(gpt2.TRAITS, defaults={**gpt2.TRAITS.defaults, "hidden_act": "gelu_pytorch_tanh"}, block=_block)
