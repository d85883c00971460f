"""Products of a latent attention's heads with the latents (`kv_b_proj`), with adapters.

Keys and values of head h are W_k[h] c and W_v[h] c of a token's latent c. They are never computed: a query is
multiplied by W_k[h] before it attends to the latents, and what it finds there by W_v[h] after that. An adapter's B A is
added to W, so each query has two further terms, of the same form:

    query   q W_k[h] + (q B_k[h]) A             q [N], B_k[h] [N, r], A [r, L]
    value   W_v[h] o + B_v[h] (A o)             o [L], B_v[h] [V, r]

All tokens that a query attends to are of its request, so they have its adapter. A bias of the keys is the same for all
of them and changes no attention; one of the values is added to the result.

T tokens, H heads, L rank of the latents, r rank of an adapter, N elements of a query, V of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.linear import Packed, pack, row_squares
from ...kernels.linear.invariant import product
from ..latent_config import LatentConfig
from .linear import AdapterRows, Linear
from .weights import WeightSlot


class LatentProducts(Linear):
    """The products with W_k and W_v, which are rows of one weight [H · (N + V), L]."""

    def __init__(self, name: str, module: str, heads: int, latent: LatentConfig, **common: Any) -> None:
        """`common`: dtype, device and batch_invariant, as in `Linear`."""
        self._sizes = [latent.plain_dim, latent.value_dim]
        super().__init__(name, [(module, heads * sum(self._sizes))], latent.rank, **common)
        self._heads = heads
        self._keys, self._values = HeadProducts(self._batch_invariant), HeadProducts(self._batch_invariant)

    def queries(self, x: Tensor, batch: AdapterRows) -> Tensor:
        """Queries [T, H, L] for the latents, from queries x [T, H, N] for keys."""
        if self.lora is None or batch.adapters is None:
            return self._keys(x)
        y = self._keys(self._scaled(x, 0, batch.adapters))
        for start, stop, a, b in self.lora.weights_of_runs(batch.adapters):
            up, _ = self._of_heads(b)
            y[start:stop] += self._each(self._per_head(x[start:stop], up.mT), a.t())
        return y

    def values(self, x: Tensor, batch: AdapterRows) -> Tensor:
        """Values [T, H, V] from sums of latents x [T, H, L]."""
        y = self._values(x)
        if self.lora is None or batch.adapters is None:
            return y
        y = self._scaled(y, 1, batch.adapters)
        for start, stop, a, b in self.lora.weights_of_runs(batch.adapters):
            _, down = self._of_heads(b)
            y[start:stop] += self._per_head(self._each(x[start:stop], a), down)
        return y

    def _of_heads(self, b: Tensor) -> list[Tensor]:
        """B_k [H, r, N] and B_v [H, r, V] of b [r, H · (N + V)]."""
        return list(b.view(len(b), self._heads, -1).transpose(0, 1).split(self._sizes, 2))

    def _scaled(self, x: Tensor, part: int, adapters: Any) -> Tensor:
        """Elements x [T, H, ·] of queries (part 0) or values (part 1) with the adapters' gains; values with biases."""
        if self.gains is None or not self.gains.written:
            return x
        whole = x.new_zeros(len(x), self._heads, sum(self._sizes))
        mine = whole.split(self._sizes, 2)[part]
        mine.copy_(x)
        self.gains.scale(whole.flatten(1), adapters, biased=part == 1)
        return mine

    def _each(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H, in] times weight [out, in] for every head: [T, H, out]."""
        rows = x.reshape(-1, x.shape[2])
        y = product(rows, weight.contiguous()) if self._batch_invariant else rows @ weight.t()
        return y.view(len(x), self._heads, -1)

    def _per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H, in] times weight [H, in, out] of each head: [T, H, out]."""
        if self._batch_invariant:
            heads = [product(x[:, h].contiguous(), weight[h].t().contiguous()) for h in range(self._heads)]
            return torch.stack(heads, 1)
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    # --- what `Linear` has for others ---

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See Linear. A quantised weight is dequantised."""
        ((module, rows),) = (self if self.part is None else self.part).slices
        name, slot = f"{module}.weight", WeightSlot((rows, self.in_features), self._load, self.in_features**-0.5)
        return {name: self._remembering(slot, name)}

    def _load(self, tensor: Tensor) -> None:
        part: Any = tensor if self.part is None else self.part.weight(self.slices[0][0], tensor)
        weight = part.to(self._device, self._dtype)
        keys, values = weight.view(self._heads, -1, self.in_features).split(self._sizes, 1)
        self._keys.load(keys.mT)  # a query of N elements becomes one of L
        self._values.load(values)
        self.row_squares = row_squares(weight)
        self._packed = _Held(self, weight.nbytes)

    def project(self, x: Tensor) -> Tensor:
        """See Linear."""
        keys, values = self._keys.weight(), self._values.weight().mT  # [H, N, L], [H, V, L]
        return x @ torch.cat([keys, values], 1).flatten(0, 1).t()


class _Held:
    """The weight as others see it that ask a layer for its packed weight."""

    fuses_adapters = True  # no other products need other threads because of it
    __slots__ = ("_products", "in_features", "num_bytes", "out_features")

    def __init__(self, products: LatentProducts, num_bytes: int) -> None:
        self._products, self.num_bytes = products, num_bytes
        self.in_features, self.out_features = products.in_features, products.out_features

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ (+ residual)."""
        y = self._products.project(x)
        return y if residual is None else y + residual

    def without_bias(self, x: Tensor) -> Tensor:
        """x Wᵀ."""
        return self._products.project(x)


class HeadProducts:
    """One product for each head: y[:, h] = W[h] x[:, h]."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant
        self._weight: Tensor | None = None
        self._packed: list[Packed] = []
        self._kind: dict[str, Any] = {}

    def load(self, weight: Tensor) -> None:
        """Take W [H, out, in]."""
        if self._batch_invariant:
            self._packed = [pack(head.contiguous(), batch_invariant=True) for head in weight]
            self._kind = {"dtype": weight.dtype, "device": weight.device}
        else:
            self._weight = weight.mT.contiguous()

    def weight(self) -> Tensor:
        """The transposed weights [H, in, out]; packed ones are had from products with the identity, which are exact."""
        if self._packed:
            identity = torch.eye(self._packed[0].in_features, **self._kind)
            return torch.stack([head(identity) for head in self._packed])
        assert self._weight is not None, "the loader left no slot empty"
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [T, H, out] from x [T, H, in]."""
        if self._packed:
            return torch.stack([head(x[:, index].contiguous()) for index, head in enumerate(self._packed)], 1)
        return torch.bmm(x.transpose(0, 1), self.weight()).transpose(0, 1)
