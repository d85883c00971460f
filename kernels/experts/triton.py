"""Grouped product of all experts in one launch: a program multiplies a tile of one expert's pairs with a block of its
weight. The host does not wait for the device: the grid is as large as any routing of the tokens may need.

P pairs of a token and its j-th expert, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..act_and_mul import act_and_mul
from ..compile_case import CompileCase, make_case
from .torch import Routing, combine

BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES = 64, 64, 4, 3


@triton.jit
def _grouped_kernel(
    x,  # [P / PAIRS, IN]: pair p reads row p / PAIRS
    addresses,  # [E] int64: weight [OUT, IN] of each expert
    biases,  # [E, OUT], or anything without HAS_BIAS
    order,  # [P] int64: pairs, sorted by expert
    experts,  # [tiles] int64: expert of each tile; at least NUM_EXPERTS when there is no such tile
    pair_ends,  # [E] int64: end of each expert's pairs in `order`
    tile_ends,  # [E] int64: end of each expert's tiles
    y,  # [P, OUT]
    NUM_EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """y[p] = W[expert of p] x[p / PAIRS] (+ b[expert of p])"""
    blocks: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    expert = tl.load(experts + tile)
    if expert < NUM_EXPERTS:
        before = expert > 0
        first = tl.load(pair_ends + expert - 1, mask=before, other=0)
        tile -= tl.load(tile_ends + expert - 1, mask=before, other=0).to(tl.int32)
        place = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        known = place < tl.load(pair_ends + expert)
        pair = tl.load(order + place, mask=known, other=0)
        column = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
        weight = tl.multiple_of(weight, 16)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, IN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            rows = x + (pair // PAIRS)[:, None] * IN + k[None, :]
            inputs = tl.load(rows, mask=known[:, None] & (k < IN)[None, :], other=0.0)
            inside = (k < IN)[:, None] & (column < OUT)[None, :]
            block = tl.load(weight + column[None, :] * IN + k[:, None], mask=inside, other=0.0)
            sums = tl.dot(inputs, block, sums, input_precision="ieee")
        if HAS_BIAS:
            sums += tl.load(biases + expert * OUT + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
        target = y + pair[:, None] * OUT + column[None, :]
        tl.store(target, sums.to(y.dtype.element_ty), mask=known[:, None] & (column < OUT)[None, :])


class _Plan(NamedTuple):
    """Arguments of the kernel that depend on the routing, and its tiles."""

    order: Tensor
    experts: Tensor
    pair_ends: Tensor
    tile_ends: Tensor
    block_m: int


def _plan(experts: Tensor, num_experts: int) -> _Plan:
    """Tiles of the pairs of `experts` [T, k]."""
    num_pairs = experts.numel()
    block_m = 16 if num_pairs < 32 * num_experts else 64
    ranked, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(ranked, numbers, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    tile_ends = ((counts + block_m - 1) // block_m).cumsum(0)
    tiles = torch.arange(num_pairs // block_m + min(num_pairs, num_experts), device=experts.device)
    return _Plan(order, torch.searchsorted(tile_ends, tiles, right=True), ends, tile_ends, block_m)


class TritonExperts:
    """Weights of each expert of a layer, which stay where they are."""

    def __init__(
        self,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        *,
        biases: Sequence[Tensor | None] = (None, None),
        activation: str = "silu",
    ) -> None:
        """Make experts of contiguous weights [2I, H] and [H, I], and of `biases` [E, 2I] and [E, H]."""
        self._kept = gate_up, down
        self._biases = biases
        self._activation = activation
        self._addresses = [
            torch.tensor([weight.data_ptr() for weight in part], device=part[0].device) for part in (gate_up, down)
        ]

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        """Compute y [T, H] from x [T, H], as a new tensor; `residual` [T, H] is added."""
        num_tokens, top_k = routing.experts.shape
        plan = _plan(routing.experts, len(self._kept[0]))
        inner = act_and_mul(self._product(x.contiguous(), 0, plan, top_k), self._activation)
        outputs = self._product(inner, 1, plan, 1)
        return combine(outputs.view(num_tokens, top_k, -1), routing.weights, residual)

    def _product(self, x: Tensor, part: int, plan: _Plan, pairs: int) -> Tensor:
        out, inputs = self._kept[part][0].shape
        y = x.new_empty(len(plan.order), out)
        biases = self._biases[part]
        grid = (len(plan.experts) * triton.cdiv(out, BLOCK_N),)
        if len(plan.order):
            _grouped_kernel[grid](
                x, self._addresses[part], x if biases is None else biases, *plan[:4], y,
                NUM_EXPERTS=len(self._kept[part]), PAIRS=pairs, IN=inputs, OUT=out, BLOCK_M=plan.block_m,
                BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, HAS_BIAS=biases is not None, num_warps=NUM_WARPS,
                num_stages=NUM_STAGES,
            )  # fmt: skip
        return y


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel: both tiles, shapes of models, every dtype."""
    shapes = (
        ("bf16", 128, 8, 2048, 1536, 16),
        ("bf16", 128, 1, 768, 2048, 64),
        ("fp16", 8, 2, 4096, 28672, 64),
        ("bf16", 32, 4, 2880, 5760, 16),
        ("bf16", 32, 1, 2880, 2880, 64),
    )
    return [
        make_case(
            f"experts {dtype} e{experts} k{pairs} {inputs}x{out} m{block_m}",
            _grouped_kernel,
            {
                "NUM_EXPERTS": experts, "PAIRS": pairs, "IN": inputs, "OUT": out,
                "BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "HAS_BIAS": experts == 32,
            },
            {"x biases y": f"*{dtype}", "addresses order experts pair_ends tile_ends": "*i64"},
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        for dtype, experts, pairs, inputs, out, block_m in (*shapes, ("fp32", 5, 2, 50, 30, 16))
    ]  # fmt: skip
