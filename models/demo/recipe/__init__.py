"""How the demo model is made: generated text, a tokenizer, a base model, a draft model, three adapters, an EAGLE-3 head and a card.

Run it with ``python -m outrider.models.demo.recipe``. Nothing is downloaded: every training text is drawn by the
generators of this package from a seed.
"""
