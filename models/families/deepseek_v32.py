"""DeepSeek-V3.2: DeepSeek-V3 whose tokens attend to the `index_topk` best earlier ones, which an indexer chooses.

In contexts of at most `index_topk` tokens all are chosen, and attention is DeepSeek-V3's. The context is bounded by
that number, and the indexer is not loaded.
"""

from dataclasses import replace

from . import deepseek_v3

TRAITS = replace(
    deepseek_v3.TRAITS,
    defaults={**deepseek_v3.TRAITS.defaults, "max_position_embeddings": 163840, "index_topk": 2048},
    context_bound="index_topk",
    unused=r"\.self_attn\.indexer\.",
)
