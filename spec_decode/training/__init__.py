"""Training of drafters: EAGLE-3, EAGLE and Medusa heads, and the draft weights of an adapter, by distillation.

`options` is free of torch; `run.train_draft` assembles the parts. The target is a frozen transformers model.
"""
