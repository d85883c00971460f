"""Models: families, checkpoints, layers and attention of the decoder, and the embedded demo model.

Shapes: T tokens of a pass, B rows (sequences) of a pass, R rows of logits, D elements of a head, H query heads and Hk
KV heads; outside attention H is the hidden size.
"""
