"""DoRA: adapters with trained magnitudes (Liu et al. 2024, arXiv:2402.09353, section 4), batched with adapters without.

    y = g ∘ (x Wᵀ + x Aᵀ Bᵀ) + bias        g = m / ||W + B A||, row by row; B with the scale folded in
      = (x Wᵀ + bias) + (g - 1) ∘ x Wᵀ + x Aᵀ (g ∘ B)ᵀ

The gain g is computed once, when the adapter is read, and folded into B. A step adds only the middle term, and only for
tokens whose adapter has gains; see `vectors`.

out, in: features of a projection; r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...kernels.linear import row_squares

if TYPE_CHECKING:
    from ...models.layers.embedding import Embedding
    from ...models.layers.linear import Linear


class BaseWeight(NamedTuple):
    """Functions of a module's base weights that gains and trained biases need. Thread-safe."""

    measure: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Takes x [n, in]; returns the squared norm of each row of the weight W [out, in], [out] float32, and x Wᵀ
    [n, out], both on any device."""
    bias: Callable[[], Tensor | None] = lambda: None
    """Returns the bias [out]; None when the module has none."""


def divided_weight(read: Callable[[], Tensor], bias: Callable[[], Tensor | None] = lambda: None) -> BaseWeight:
    """Return a weight [out, in] of which each of several ranks has a part: `read` reads all of it from the checkpoint,
    so that the rank that reads adapters needs no others."""

    def measure(x: Tensor) -> tuple[Tensor, Tensor]:
        weight = read().contiguous()
        return row_squares(weight), x @ weight.t()

    return BaseWeight(measure, bias)


def slice_weight(linear: Linear, start: int, size: int, module: str) -> BaseWeight:
    """Return the weight of one module of a merged projection: `size` rows from `start` on."""

    def whole_bias() -> Tensor | None:
        read = linear.whole.get(f"{module}.bias")
        return None if read is None else read()

    if linear.part is not None:
        return divided_weight(lambda: linear.whole[f"{module}.weight"](), whole_bias)

    def measure(x: Tensor) -> tuple[Tensor, Tensor]:
        assert linear.row_squares is not None
        squares = linear.row_squares[start : start + size]
        return squares, linear.project(x.to(squares.device))[:, start : start + size]

    def bias() -> Tensor | None:
        return None if linear.bias is None else linear.bias[start : start + size]

    return BaseWeight(measure, bias)


def table_weight(embedding: Embedding) -> BaseWeight:
    """Return the token embeddings, which an adapter sees as a weight [hidden, vocab]."""
    if embedding.part is not None:
        return divided_weight(lambda: embedding.whole[embedding.names.table]().t())
    return BaseWeight(lambda x: (embedding.table_squares(), embedding.project_table(x.to(embedding.device))))


def head_weight(embedding: Embedding) -> BaseWeight:
    """Return the weight of the LM head."""
    if embedding.part is not None:
        name = embedding.names.table if embedding.tied else embedding.names.head
        return divided_weight(lambda: embedding.whole[name](), lambda: embedding.head_bias)

    def measure(x: Tensor) -> tuple[Tensor, Tensor]:
        assert embedding.head_squares is not None
        return embedding.head_squares, embedding.project_head(x.to(embedding.device))

    return BaseWeight(measure, lambda: embedding.head_bias)


@torch.no_grad()
def compute_gains(magnitude: Tensor, a: Tensor, b: Tensor, base: BaseWeight) -> Tensor:
    """Compute g [out] float32 from ||W + B A||² = ||W||² + 2 B · (W Aᵀ) + B (A Aᵀ) Bᵀ, row by row, without a copy of W.

    Args:
        magnitude: m, [out].
        a: [r, in], in the dtype of use.
        b: [r, out] float32, with the scale folded in.
    """
    norms, cross = base.measure(a)
    wide = a.float()
    squares = norms.cpu() + (b * (2 * cross.float().cpu() + (wide @ wide.t()) @ b)).sum(0)
    return magnitude.float() / squares.clamp_(min=0).sqrt_()
