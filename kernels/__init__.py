"""Operations, one sub-package each: a PyTorch reference, and Triton or C++ kernels if they are faster.

Shapes: T tokens of a step, B rows (sequences) of a step, R rows of logits, V vocabulary, D elements of a head, H query
heads and Hk KV heads; outside attention H is the hidden size.
"""
