"""The recipe of the demo model: generated text, a tokenizer, a base model, a draft model, adapters, a head, a card.

`python tools/demo_model` runs it. Nothing is downloaded: seeded generators in this folder draw every training text.
"""
