"""Products with quantised weights: a program makes numbers of a block of codes in registers, multiplies them with a
tile of tokens, and multiplies the sums of a group with its scale. The weight is the left operand: that one tensor cores
take from registers.

For few tokens a launch has few programs, so that the inputs are split among several; a second kernel adds their sums,
in order. `torch._int_mm` and `torch._weight_int4pack_mm` would serve some forms, but refuse few tokens or round scales
to bfloat16, and would be further paths. `torch._scaled_mm` wants inputs in FP8.

T tokens, I inputs, O outputs, S bytes of a row of codes; see `device_weight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..tuning import bucket, tuned
from ..tuning.configs import QuantizedLinearConfig
from . import device_weight
from .device_weight import WHOLE, DeviceWeight, join
from .weight import QuantizedWeight

MAX_PARTS = 16
"""Most parts of the inputs."""
REDUCE_BLOCK = 256
ROUND_BLOCK, ROUND_WARPS = 1024, 4
_LEAST = 256
"""Fewest bytes of a row that a program multiplies."""


@triton.jit
def _numbers(packed, levels, dtype: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr):
    """Numbers of codes less ZERO, in `dtype`, which holds them exactly. HALF: the codes in the upper halves of bytes.

    Numbers are made of bits, since conversions are slow. Of 4 bits: the mantissa of a number from 16 on. Of FP8: a
    number whose exponent is too small by the difference of both biases; its product with a power of two is exact, also
    of subnormals.
    """
    bits: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
    mantissa: tl.constexpr = 23 if dtype == tl.float32 else 10 if dtype == tl.float16 else 7
    if FORM == "int4":
        sixteen: tl.constexpr = 0x41800000 if dtype == tl.float32 else 0x4C00 if dtype == tl.float16 else 0x4180
        code = (packed >> 4 if HALF else packed & 15).to(bits)
        numbers = (code << (mantissa - 4) | sixteen).to(dtype, bitcast=True) - (16 + ZERO)
    elif FORM == "levels4":
        numbers = tl.load(levels + (packed >> 4 if HALF else packed & 15).to(tl.int32))
    elif FORM == "levels8":
        numbers = tl.load(levels + packed.to(tl.int32))
    elif FORM == "fp8":
        sign: tl.constexpr = 24 if dtype == tl.float32 else 8
        power: tl.constexpr = 256.0 if dtype == tl.float16 else 1.329227995784916e36  # 2^8, 2^120
        wide = packed.to(bits)
        numbers = ((wide & 0x7F) << (mantissa - 3) | (wide & 0x80) << sign).to(dtype, bitcast=True) * power
    else:
        numbers = packed.to(dtype)
    return numbers


@triton.jit
def tile_product(
    x_rows, known, codes, scales, offsets, levels, rows, wanted, first, stop, IN, OUT, codes_stride,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product [BLOCK_O, BLOCK_T] float32 of the outputs `rows` and the tokens at `x_rows`, over bytes [first, stop) of
    the codes; `wanted` and `known` are masks of both. A group has whole blocks."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    is_exact: tl.constexpr = dtype == tl.int8
    halves: tl.constexpr = 2 if FORM == "int4" or FORM == "levels4" else 1
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.int32 if is_exact else tl.float32)
    step = tl.arange(0, BLOCK_K)
    codes += rows.to(tl.int64)[:, None] * codes_stride + step[None, :]
    for start in tl.range(first, stop, BLOCK_K):
        packed = tl.load(codes + start, mask=wanted[:, None], other=0)
        for half in tl.static_range(halves):
            k = start + half * codes_stride
            group = (k // GROUP).to(tl.int64) * OUT
            if HAS_SCALES:  # early: they are needed late
                scale = tl.load(scales + group + rows, mask=wanted, other=0.0)
                if HAS_OFFSETS:
                    offset = tl.load(offsets + group + rows, mask=wanted, other=0.0)
            inside = known[None, :] & (k + step < IN)[:, None]
            inputs = tl.load(x_rows[None, :] + k + step[:, None], mask=inside, other=0)
            if is_exact:
                sums = tl.dot(packed, inputs, sums, out_dtype=tl.int32)
            else:
                numbers = _numbers(packed, levels, dtype, half, FORM, ZERO)
                if HAS_SCALES:
                    sums += tl.dot(numbers, inputs, input_precision="ieee") * scale.to(tl.float32)[:, None]
                    if HAS_OFFSETS:
                        sums += offset.to(tl.float32)[:, None] * tl.sum(inputs.to(tl.float32), axis=0)[None, :]
                else:
                    sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
    return sums.to(tl.float32)


@triton.jit
def _store(
    total, y, factors, offsets, rounded, bias, residual, rows, wanted, tokens, known, y_stride, residual_stride,
    HAS_OFFSETS: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[tokens, rows] = total [rows, tokens] · factors, with bias and residual; y is mutated."""
    inside = wanted[:, None] & known[None, :]
    total *= tl.load(factors + rows, mask=wanted, other=0.0)[:, None]
    if IS_ROUNDED:
        if HAS_OFFSETS:
            codes = tl.load(rounded + 2 * tokens + 1, mask=known, other=0.0)
            total += tl.load(offsets + rows, mask=wanted, other=0.0)[:, None] * codes[None, :]
        total *= tl.load(rounded + 2 * tokens, mask=known, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=wanted, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        added = tl.load(residual + tokens[None, :] * residual_stride + rows[:, None], mask=inside, other=0.0)
        total += added.to(tl.float32)
    tl.store(y + tokens[None, :] * y_stride + rows[:, None], total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "IN", "OUT"])
def _product_kernel(
    x,  # [T, IN], of the dtype, or int8 where inputs are rounded
    rounded,  # [T, 2] float32: scale of the rounded inputs, and sum of their codes
    codes,  # [OUT, codes_stride]
    scales,  # [G, OUT]
    offsets,  # [G, OUT]
    levels,
    factors,  # [OUT]
    bias,  # [OUT]
    residual,  # [T, OUT]
    y,  # [T, OUT]; of a launch in parts [PARTS, T, OUT] float32, without factors
    num_tokens,
    IN,
    OUT,
    x_stride,
    codes_stride,
    residual_stride,
    y_stride,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # a program has one part; else all
    ALIGNMENT: tl.constexpr,  # of IN and OUT
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = x Wᵀ + b (+ residual), or parts of the sums of x Wᵀ. The order of a sum depends on PARTS and BLOCK_K."""
    IN, OUT = IN // ALIGNMENT * ALIGNMENT, OUT // ALIGNMENT * ALIGNMENT  # so that the compiler knows
    tiles = tl.cdiv(num_tokens, BLOCK_T)
    rest = tl.program_id(0) // tiles
    tokens = (tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    known = tokens < num_tokens
    blocks = tl.cdiv(OUT, BLOCK_O)
    rows = rest % blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    wanted = rows < OUT
    x_rows = x + tokens * x_stride
    is_exact: tl.constexpr = x.dtype.element_ty == tl.int8
    width = tl.cdiv(codes_stride, PARTS * BLOCK_K) * BLOCK_K
    if IS_SPLIT:
        part = rest // blocks
        total = tile_product(
            x_rows, known, codes, scales, offsets, levels, rows, wanted,
            part * width, tl.minimum(part * width + width, codes_stride), IN, OUT, codes_stride,
            FORM, GROUP, ZERO, HAS_SCALES, HAS_OFFSETS and not is_exact, BLOCK_O, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        target = y + (part * num_tokens + tokens)[None, :] * OUT + rows[:, None]
        tl.store(target, total, mask=wanted[:, None] & known[None, :])
    else:
        total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        for part in tl.range(PARTS):
            total += tile_product(
                x_rows, known, codes, scales, offsets, levels, rows, wanted,
                part * width, tl.minimum(part * width + width, codes_stride), IN, OUT, codes_stride,
                FORM, GROUP, ZERO, HAS_SCALES, HAS_OFFSETS and not is_exact, BLOCK_O, BLOCK_T, BLOCK_K,
            )  # fmt: skip
        _store(
            total, y, factors, offsets, rounded, bias, residual, rows, wanted, tokens, known,
            y_stride, residual_stride, HAS_OFFSETS, is_exact, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "OUT"])
def _reduce_kernel(
    sums,  # [PARTS, T, OUT] float32
    rounded,
    offsets,
    factors,
    bias,
    residual,
    y,  # [T, OUT]
    num_tokens,
    OUT,
    residual_stride,
    y_stride,
    HAS_OFFSETS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """y = sums of all parts, in order, · factors + b (+ residual)"""
    blocks = tl.cdiv(OUT, BLOCK_O)
    rows = tl.program_id(0) % blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    tokens = (tl.program_id(0) // blocks + tl.arange(0, 1)).to(tl.int64)
    wanted, known = rows < OUT, tokens < num_tokens
    places = sums + tokens[None, :] * OUT + rows[:, None]
    total = tl.load(places, mask=wanted[:, None], other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(places + part * num_tokens.to(tl.int64) * OUT, mask=wanted[:, None], other=0.0)
    _store(
        total, y, factors, offsets, rounded, bias, residual, rows, wanted, tokens, known,
        y_stride, residual_stride, HAS_OFFSETS, IS_ROUNDED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _round_kernel(
    x,  # [T, IN]
    codes,  # [T, IN] int8
    rounded,  # [T, 2] float32: scale, and sum of the codes
    IN,
    x_stride,
    BLOCK: tl.constexpr,
):
    """scale = max |x| / 127 of a row, codes = round(x / scale), ties to even"""
    token = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, IN, BLOCK):
        k = start + step
        value = tl.load(x + token * x_stride + k, mask=k < IN, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.math.div_rn(tl.max(largest, 0), 127.0)
    divisor = tl.where(scale > 0, scale, 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, IN, BLOCK):
        k = start + step
        value = tl.load(x + token * x_stride + k, mask=k < IN, other=0.0).to(tl.float32)
        # A float32 near 1.5 · 2^23 has no fraction.
        code = tl.math.div_rn(value, divisor) + 12582912.0 - 12582912.0
        tl.store(codes + token * IN + k, code.to(tl.int8), mask=k < IN)
        total += code
    total = tl.sum(total, 0)
    tl.store(rounded + 2 * token, scale + 0 * total)  # NaN where an input is not finite
    tl.store(rounded + 2 * token + 1, total)


def default_config(tile: int, bits: int, itemsize: int) -> QuantizedLinearConfig:
    """Default launch config for tiles of `tile` tokens, codes of `bits`, and inputs of `itemsize` bytes."""
    if itemsize == 4:  # without tensor cores
        outputs = 32 if tile <= 32 else 16
        return QuantizedLinearConfig(block_o=outputs, block_k=32, num_warps=4, num_stages=2, programs=256)
    if tile == 16:
        # A warp has 16 outputs, so that no two make the same numbers.
        return QuantizedLinearConfig(block_o=32, block_k=128, num_warps=2, num_stages=4, programs=256)
    outputs, stages = max(64, tile), 3 if tile > 32 else 4
    return QuantizedLinearConfig(outputs, block_k=8 * bits, num_warps=outputs // 16, num_stages=stages, programs=256)


TILES = (16, 64, 128)
"""Tokens of a tile: of few tokens, of some, and of prompts."""
INVARIANT_TILE = 32
"""Tile of every step where a row must not depend on other rows: it has registers for the sums of all parts too."""


def is_served(blocks: Sequence[QuantizedWeight], dtype: torch.dtype) -> bool:
    """True when `TritonQuantizedLinear` can hold these blocks."""
    return all(map(device_weight.is_served, blocks)) and dtype in (torch.float16, torch.bfloat16, torch.float32)


class TritonQuantizedLinear:
    """Packed weight [out, in] and bias [out]; immutable. Blocks of different forms take a launch each."""

    fuses_adapters = False
    __slots__ = ("_batch_invariant", "_bias", "_dtype", "in_features", "num_bytes", "out_features", "weights")

    def __init__(
        self, blocks: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool
    ) -> None:
        """Pack `blocks`, for which `is_served` is True: see the package."""
        self.weights = join(blocks, dtype)
        """Rows of the weight as the kernels read them, in order."""
        self._bias = None if bias is None else bias.to(dtype)
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self.out_features = sum(weight.outputs for weight in self.weights)
        self.in_features = blocks[0].shape[1]
        self.num_bytes = sum(weight.num_bytes for weight in self.weights)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor.

        Args:
            x: [T, in], of the dtype.
            residual: [T, out], of the dtype; added before the result is rounded.
        """
        return self._product(x, self._bias, residual)

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        return self._product(x, None, None)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] int64 of the weight: [n, in] in the dtype."""
        (weight,) = self.weights
        return weight.dense(ids).to(self._dtype)

    def _product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = torch.empty(len(x), self.out_features, dtype=self._dtype, device=x.device)
        if not len(x):
            return y
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        first = 0
        for weight in self.weights:
            outputs = slice(first, first + weight.outputs)
            first = outputs.stop
            _multiply(
                _Operands(
                    x if weight.order is None else x.index_select(1, weight.order),
                    weight,
                    y[:, outputs],
                    None if bias is None else bias[outputs],
                    None if residual is None else residual[:, outputs],
                ),
                self._batch_invariant,
            )
        return y


class _Operands(NamedTuple):
    x: Tensor
    weight: DeviceWeight
    y: Tensor
    """[T, O], whose rows may be any distance apart; written."""
    bias: Tensor | None
    residual: Tensor | None

    @property
    def ends(self) -> dict[str, Any]:
        """Constants of the kernel that stores the result."""
        return {"HAS_BIAS": self.bias is not None, "HAS_RESIDUAL": self.residual is not None}


def _multiply(operands: _Operands, batch_invariant: bool) -> None:
    """Launch the kernels of one product."""
    x, weight, y, bias, residual = operands
    num_tokens = len(x)
    tile = INVARIANT_TILE if batch_invariant else next((t for t in TILES if num_tokens <= t), TILES[-1])
    config = config_of(weight, tile, x.device, x.element_size())
    parts = num_parts(weight, config) if tile < TILES[-1] else 1
    is_split = parts > 1 and num_tokens <= tile
    rounded = weight.factors
    if weight.rounds_inputs:
        x, rounded = _round(x)
    added = y if residual is None else residual
    rest = weight.factors, y if bias is None else bias, added
    target = torch.empty(parts, *y.shape, dtype=torch.float32, device=x.device) if is_split else y
    block_k = _block_k(config, weight.group)
    constants = form_constants(weight) | {"PARTS": parts, "IS_SPLIT": is_split}
    constants |= {"HAS_BIAS": False, "HAS_RESIDUAL": False} if is_split else operands.ends
    grid = triton.cdiv(weight.outputs, config.block_o) * triton.cdiv(num_tokens, tile) * (parts if is_split else 1)
    _product_kernel[(grid,)](
        *(x, rounded, *tables(weight), *rest, target),
        *(num_tokens, weight.inputs, weight.outputs, x.stride(0), weight.codes.stride(0)),
        *(added.stride(0), y.stride(0)),
        **constants,
        BLOCK_O=config.block_o,
        BLOCK_T=tile,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_split:
        _reduce_kernel[(triton.cdiv(weight.outputs, REDUCE_BLOCK) * num_tokens,)](
            *(target, rounded, tables(weight)[2], *rest, y),
            *(num_tokens, weight.outputs, added.stride(0), y.stride(0)),
            HAS_OFFSETS=weight.offsets is not None and weight.rounds_inputs,
            IS_ROUNDED=weight.rounds_inputs,
            **operands.ends,
            PARTS=parts,
            BLOCK_O=REDUCE_BLOCK,
        )


def tables(weight: DeviceWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, offsets and levels as arguments of a kernel; others stand for those that are None."""
    scales = weight.factors if weight.scales is None else weight.scales
    offsets = scales if weight.offsets is None else weight.offsets
    return weight.codes, scales, offsets, weight.factors if weight.levels is None else weight.levels


def form_constants(weight: DeviceWeight) -> dict[str, Any]:
    """Constants of a kernel that depend on the form of the weight."""
    return {
        "FORM": weight.form,
        "GROUP": weight.group,
        "ZERO": weight.zero,
        "HAS_SCALES": weight.scales is not None,
        "HAS_OFFSETS": weight.offsets is not None,
        "ALIGNMENT": 16 if weight.inputs % 16 == weight.outputs % 16 == 0 else 1,
    }


def _round(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, I] int8 of inputs, and [T, 2] float32: their scale and the sum of the codes."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    rounded = torch.empty(len(x), 2, dtype=torch.float32, device=x.device)
    _round_kernel[(len(x),)](x, codes, rounded, x.shape[1], x.stride(0), BLOCK=ROUND_BLOCK, num_warps=ROUND_WARPS)
    return codes, rounded


def config_of(weight: DeviceWeight, tile: int, device: torch.device, itemsize: int) -> QuantizedLinearConfig:
    """Launch config for inputs of `itemsize` bytes."""
    shape = shape_of(weight, tile, itemsize)
    return tuned(device, default_config(tile, *shape[3:]), *shape)


def shape_of(weight: DeviceWeight, tile: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Shape by which the launch config is found: see `QuantizedLinearConfig`."""
    size = 1 if weight.rounds_inputs else itemsize
    return tile, bucket(weight.inputs), bucket(weight.outputs), weight.bits, size


def _block_k(config: QuantizedLinearConfig, group: int) -> int:
    """Bytes of a block: a group has whole blocks."""
    return min(config.block_k, group & -group)


def num_parts(weight: DeviceWeight, config: QuantizedLinearConfig) -> int:
    """Number of parts of the inputs: as many as give a launch for one tile enough programs."""
    programs, parts = triton.cdiv(weight.outputs, config.block_o), 1
    while programs * parts < config.programs and parts < MAX_PARTS and weight.codes.shape[1] >= 2 * parts * _LEAST:
        parts *= 2
    return parts


def compile_cases() -> list[CompileCase]:
    """Cases of the kernels: forms of each format, with groups longer and shorter than a block, and every tile."""
    forms = [
        ("int4", 128, 8, False, "bf16"),
        ("int4", 32, 0, True, "fp16"),
        ("int4", 64, 0, True, "fp32"),
        ("levels4", 64, 0, False, "bf16"),
        ("int8", WHOLE, 0, False, "bf16"),
        ("int8", 16, 0, True, "bf16"),
        ("fp8", WHOLE, 0, False, "fp16"),
        ("fp8", 128, 0, False, "bf16"),
        ("int8", WHOLE, 0, True, "i8"),
    ]
    cases = [
        _product_case(form, tile, parts)
        for form in forms
        for tile, parts in ((TILES[0], 1), (TILES[0], 4), (INVARIANT_TILE, -4), (TILES[1], 4), (TILES[2], 1))
    ]
    for dtype, is_rounded in (("bf16", False), ("fp16", True)):
        ends = {"HAS_OFFSETS": is_rounded, "IS_ROUNDED": is_rounded, "HAS_BIAS": is_rounded, "HAS_RESIDUAL": True}
        types = {"sums rounded factors offsets": "*fp32", "bias residual y": f"*{dtype}"}
        name = f"quantized_linear reduce {dtype}{' rounded' if is_rounded else ''}"
        cases.append(make_case(name, _reduce_kernel, ends | {"PARTS": 8, "BLOCK_O": REDUCE_BLOCK}, types))
        types = {"x": f"*{dtype}", "codes": "*i8", "rounded": "*fp32"}
        name = f"quantized_linear round {dtype}"
        cases.append(make_case(name, _round_kernel, {"BLOCK": ROUND_BLOCK}, types, num_warps=ROUND_WARPS))
    return cases


_FEW_REGISTERS = {("levels4", "bf16", 64): (90, 100), ("int4", "fp16", 128): (80, 90)}
"""Architectures of cases for which registers are enough; on the third they spill 8 and 96 bytes of a thread, which
costs time."""


def _product_case(form: tuple[str, int, int, bool, str], tile: int, parts: int) -> CompileCase:
    """Case of a product; negative `parts`: all in one program."""
    kind, group, zero, has_offsets, dtype = form
    has_scales = dtype != "i8" and (group < WHOLE or has_offsets)
    config = default_config(tile, 4 if kind.endswith("4") else 8, {"fp32": 4, "i8": 1}.get(dtype, 2))
    constants = {
        "FORM": kind, "GROUP": group, "ZERO": zero, "HAS_SCALES": has_scales, "HAS_OFFSETS": has_offsets,
        "ALIGNMENT": 16, "HAS_BIAS": parts == 1 and has_offsets, "HAS_RESIDUAL": parts < 4,
        "PARTS": abs(parts), "IS_SPLIT": parts > 1,
        "BLOCK_O": config.block_o, "BLOCK_T": tile, "BLOCK_K": _block_k(config, group),
    }  # fmt: skip
    table = "*fp32" if dtype in ("fp32", "i8") or not has_scales else "*fp16"
    own = "*bf16" if dtype == "i8" else f"*{dtype}"
    types = {
        "x": f"*{dtype}", "codes": "*i8" if kind == "int8" else "*u8", "scales offsets": table,
        "rounded factors": "*fp32", "levels": f"*{dtype}", "bias residual": own, "y": "*fp32" if parts > 1 else own,
    }  # fmt: skip
    name = f"quantized_linear {kind} g{0 if group == WHOLE else group} {dtype} tile{tile} parts{parts}"
    archs = _FEW_REGISTERS.get((kind, dtype, tile), (80, 90, 100))
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "archs": archs}
    return make_case(name, _product_kernel, constants, types, **launch)
