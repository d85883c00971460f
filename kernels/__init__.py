"""Operations with a Triton kernel and a PyTorch reference, one sub-package an operation."""
