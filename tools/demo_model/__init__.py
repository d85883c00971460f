"""The recipe of the demo model: generated text, a tokenizer, a base model, a draft model, adapters and a head.

`python tools/demo_model` runs it. Nothing is downloaded: seeded generators in this folder draw every training text.
`templates` has the language of the templates; `facts`, `talk`, `writing`, `records`, `queries` and `support` have the
texts, and `mixture` their frequencies.
"""
