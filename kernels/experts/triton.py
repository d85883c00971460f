"""Grouped product of all experts in one launch: a program multiplies a tile of one expert's pairs with a block of its
weight. The host does not wait for the device: the grid is as large as any routing of the tokens may need.

P pairs of a token and its j-th expert, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..act_and_mul import act_and_mul
from ..compile_case import CompileCase, make_case
from ..quantized_linear.device_weight import DeviceWeight
from . import triton_quantized
from .device_plan import Plan, pairs_of_tile, plan_tiles
from .torch import Routing, combine
from .triton_quantized import QuantizedExperts

BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES = 64, 64, 4, 3

AddDeltas = Callable[[Tensor, Tensor, Tensor], None]
"""Function that adds adapters' deltas to outputs [P, out] of x, [T, in] or [P, in], for experts [T, k]."""


@triton.jit
def _grouped_kernel(
    x,  # [P / PAIRS, IN]: pair p reads row p / PAIRS
    addresses,  # [E] int64: weight [OUT, IN] of each expert
    biases,  # [E, OUT], or anything without HAS_BIAS
    order,  # this and the next three: see `Plan`
    experts,
    pair_ends,
    tile_ends,
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
        pair, known = pairs_of_tile(tile, expert, order, pair_ends, tile_ends, BLOCK_M)
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


class PlainExperts:
    """One product of all experts, whose contiguous weights [out, in] are not moved."""

    def __init__(self, weights: Sequence[Tensor], biases: Tensor | None) -> None:
        self._weights = weights
        self._biases = biases
        self._addresses = torch.tensor([weight.data_ptr() for weight in weights], device=weights[0].device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights; experts may share one."""
        return sum({weight.data_ptr(): weight.nbytes for weight in self._weights}.values())

    def __call__(self, x: Tensor, plan: Plan, pairs: int, *, partial: bool = False) -> Tensor:
        """Outputs [P, out] of x [P / pairs, in], contiguous. With `partial` some pairs have no expert, and zeros."""
        out, inputs = self._weights[0].shape
        y = (x.new_zeros if partial else x.new_empty)(len(plan.order), out)
        grid = (len(plan.experts) * triton.cdiv(out, BLOCK_N),)
        if len(plan.order):
            _grouped_kernel[grid](
                x, self._addresses, x if self._biases is None else self._biases, *plan[:4], y,
                NUM_EXPERTS=len(self._weights), PAIRS=pairs, IN=inputs, OUT=out, BLOCK_M=plan.tile,
                BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, HAS_BIAS=self._biases is not None, num_warps=NUM_WARPS,
                num_stages=NUM_STAGES,
            )  # fmt: skip
        return y


class TritonExperts:
    """Weights of each expert of a layer, which are not moved."""

    def __init__(
        self,
        gate_up: Sequence[Tensor] | Sequence[DeviceWeight],
        down: Sequence[Tensor] | Sequence[DeviceWeight],
        *,
        biases: Sequence[Tensor | None] = (None, None),
        activation: str = "silu",
        partial: bool = False,
    ) -> None:
        """Make experts of weights [2I, H] and [H, I], contiguous or quantised in one form, and of `biases` [E, 2I] and
        [E, H]. `partial`: other processes compute some pairs."""
        self._num_experts = len(gate_up)
        self._gate_up, self._down = _product(gate_up, biases[0]), _product(down, biases[1])
        self._activation = activation
        self._partial = partial

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        residual: Tensor | None = None,
        add: tuple[AddDeltas, AddDeltas] | None = None,
    ) -> Tensor:
        """Compute y [T, H] from x [T, H], as a new tensor; `residual` [T, H] is added. `add`: of adapters, for gate and
        up, and for down."""
        num_tokens, top_k = routing.experts.shape
        plan = plan_tiles(routing.experts, self._num_experts)
        x = x.contiguous()
        outer = self._gate_up(x, plan, top_k, partial=self._partial)
        if add is not None:
            add[0](outer, x, routing.experts)
        inner = act_and_mul(outer, self._activation)
        outputs = self._down(inner, plan, 1, partial=self._partial)
        if add is not None:
            add[1](outputs, inner, routing.experts)
        return combine(outputs.view(num_tokens, top_k, -1), routing.weights, residual)


def _product(
    weights: Sequence[Tensor] | Sequence[DeviceWeight], biases: Tensor | None
) -> PlainExperts | QuantizedExperts:
    quantized = [weight for weight in weights if isinstance(weight, DeviceWeight)]
    if quantized:
        return QuantizedExperts(quantized, biases)
    return PlainExperts([weight for weight in weights if isinstance(weight, Tensor)], biases)


def compile_cases() -> list[CompileCase]:
    """Cases of both kernels: both tiles, shapes of models, every dtype."""
    shapes = (
        ("bf16", 128, 8, 2048, 1536, 16),
        ("bf16", 128, 1, 768, 2048, 64),
        ("fp16", 8, 2, 4096, 28672, 64),
        ("bf16", 32, 4, 2880, 5760, 16),
        ("bf16", 32, 1, 2880, 2880, 64),
        ("bf16", 128, 8, 2048, 16, 16),  # and two of adapters
        ("bf16", 128, 1, 16, 768, 64),
    )
    return triton_quantized.compile_cases() + [
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
