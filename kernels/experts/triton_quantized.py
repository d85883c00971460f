"""Grouped product of quantised experts in one launch: see `triton.py` and `quantized_linear/triton.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..quantized_linear.device_weight import WHOLE, DeviceWeight, chunk_of, is_alike
from ..quantized_linear.triton import block_size, default_config, tile_product
from .device_plan import Plan, pairs_of_tile


@triton.jit
def grouped_quantized_kernel(
    x,  # [P / PAIRS, IN]: pair p reads row p / PAIRS
    addresses,  # [4, E] int64: codes [OUT, STRIDE], scales [G, OUT], offsets [G, OUT] and factors [OUT] of each expert
    levels,
    biases,  # [E, OUT], or anything without HAS_BIAS
    order,
    experts,
    pair_ends,
    tile_ends,
    y,  # [P, OUT]
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[p] = W[expert of p] x[p / PAIRS] (+ b[expert of p])"""
    blocks: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    IS_PADDED: tl.constexpr = STRIDE * (2 if FORM == "int4" or FORM == "levels4" else 1) != IN
    tile = tl.program_id(0) // blocks
    expert = tl.load(experts + tile)
    if expert < NUM_EXPERTS:
        pair, known = pairs_of_tile(tile, expert, order, pair_ends, tile_ends, BLOCK_T)
        rows = tl.program_id(0) % blocks * BLOCK_O + tl.arange(0, BLOCK_O)
        wanted = rows < OUT
        code: tl.constexpr = tl.int8 if FORM == "int8" else tl.uint8
        scale: tl.constexpr = tl.float32 if x.dtype.element_ty == tl.float32 else tl.float16
        codes = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(code)), 16)
        scales = tl.load(addresses + NUM_EXPERTS + expert).to(tl.pointer_type(scale))
        offsets = tl.load(addresses + 2 * NUM_EXPERTS + expert).to(tl.pointer_type(scale))
        factors = tl.load(addresses + 3 * NUM_EXPERTS + expert).to(tl.pointer_type(tl.float32))
        sums = tile_product(
            x + tl.where(known, pair, 0) // PAIRS * IN, codes, scales, offsets, levels, tl.minimum(rows, OUT - 1),
            0, STRIDE, IN, OUT, STRIDE, FORM, GROUP, ZERO, HAS_SCALES, HAS_OFFSETS, CHUNK, IS_PADDED,
            BLOCK_O, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        sums *= tl.load(factors + rows, mask=wanted, other=0.0)[:, None]
        if HAS_BIAS:
            sums += tl.load(biases + expert * OUT + rows, mask=wanted, other=0.0).to(tl.float32)[:, None]
        target = y + pair[None, :] * OUT + rows[:, None]
        tl.store(target, sums.to(y.dtype.element_ty), mask=wanted[:, None] & known[None, :])


def serves(weights: Sequence[DeviceWeight]) -> bool:
    """True when the kernel multiplies these experts: all have one form, and inputs stay as they are."""
    first = weights[0]
    return first.order is None and not first.rounds_inputs and all(is_alike(first, other) for other in weights[1:])


class QuantizedExperts:
    """One product of all experts, whose weights are not moved; `serves` must be True."""

    def __init__(self, weights: Sequence[DeviceWeight], biases: Tensor | None) -> None:
        self._weights = weights
        self._biases = biases
        fields = ([w.codes for w in weights], [w.scales for w in weights], [w.offsets for w in weights])
        every = (*fields, [w.factors for w in weights])
        addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in tensors] for tensors in every]
        self._addresses = torch.tensor(addresses, device=weights[0].codes.device)

    def __call__(self, x: Tensor, plan: Plan, pairs: int, *, partial: bool = False) -> Tensor:
        """Outputs [P, out] of x [P / pairs, in], contiguous. With `partial` some pairs have no expert, and zeros."""
        weight = self._weights[0]
        y = (x.new_zeros if partial else x.new_empty)(len(plan.order), weight.outputs)
        config = default_config(plan.tile, weight.bits, x.element_size())
        grid = (len(plan.experts) * triton.cdiv(weight.outputs, config.block_o),)
        if len(plan.order):
            grouped_quantized_kernel[grid](
                *(x, self._addresses, x if weight.levels is None else weight.levels),
                *(x if self._biases is None else self._biases, *plan[:4], y),
                **weight.constants,
                NUM_EXPERTS=len(self._weights),
                PAIRS=pairs,
                IN=weight.inputs,
                OUT=weight.outputs,
                STRIDE=weight.codes.stride(0),
                HAS_BIAS=self._biases is not None,
                BLOCK_O=config.block_o,
                BLOCK_T=plan.tile,
                BLOCK_K=block_size(config, weight.group, weight.chunk),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        return y


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel: forms of formats, both tiles, shapes of models."""
    cases = []
    for form, group, dtype, experts, pairs, inputs, outputs, tile in (
        ("int4", 128, "bf16", 128, 8, 2048, 1536, 16),
        ("int4", 32, "bf16", 32, 1, 2880, 2880, 64),
        ("int8", WHOLE, "bf16", 8, 2, 4096, 28672, 64),
        ("fp8", 128, "bf16", 128, 1, 768, 2048, 16),
    ):
        bits = 4 if form == "int4" else 8
        config = default_config(tile, bits, 2)
        constants = {
            "FORM": form, "GROUP": group, "ZERO": 0, "HAS_SCALES": group < WHOLE, "HAS_OFFSETS": form == "int4",
            "CHUNK": chunk_of(group), "NUM_EXPERTS": experts, "PAIRS": pairs, "IN": inputs, "OUT": outputs,
            "STRIDE": -(-inputs * bits // 1024) * 128, "HAS_BIAS": experts == 32,
            "BLOCK_O": config.block_o, "BLOCK_T": tile, "BLOCK_K": block_size(config, group, chunk_of(group)),
        }  # fmt: skip
        types = {"x levels biases y": f"*{dtype}", "addresses order experts pair_ends tile_ends": "*i64"}
        name = f"experts {form} {dtype} e{experts} k{pairs} {inputs}x{outputs} tile{tile}"
        # With groups of 32 Blackwell spills 16 bytes of a thread, which costs time.
        archs = (80, 90) if group == 32 else (80, 90, 100)
        launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "archs": archs}
        cases.append(make_case(name, grouped_quantized_kernel, constants, types, **launch))
    return cases
