"""Models that run through transformers' own modelling code, with attention over our paged cache.

config.json --build_on_meta--> skeleton --dry pass--> TransformersConfig        (config.py: what is refused, by name)
skeleton: Linear, Conv1D, embedding, head --> ours, under their names --> TransformersModel  (model.py)
attention --> AttentionInterface --> PagedLayer --> backend                     (paged_attention.py)

A decoder comes in here when no family of `models.families` has its architecture, or when the user asks for it.
"""
