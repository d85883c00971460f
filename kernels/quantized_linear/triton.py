"""Products with quantised weights: a program makes numbers of a block of codes in registers, multiplies them with a
tile of tokens, and multiplies the sums of a group with its scale. The weight is the left operand: that one tensor cores
take from registers.

If outputs and tokens make too few programs, the inputs are split among several; the last one of them to end adds their
sums, in order. A tile holds up to 128 tokens, so that a code is made a number once for all of them.

`torch._int_mm` and `torch._weight_int4pack_mm` would serve some forms, but refuse few tokens or round scales
to bfloat16, and would be further paths. `torch._scaled_mm` multiplies float8 with inputs in float8 (`float8.py`).

T tokens, I inputs, O outputs, S bytes of a row of codes; see `device_weight.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compile_case import CompileCase, make_case
from ..split_sums import is_last, store_sums, sum_of_parts
from ..tuning.configs import QuantizedLinearConfig
from .device_weight import WHOLE, chunk_of
from .triton_codes import in_order, inputs_of, numbers_of, ones_of

ROUND_BLOCK, ROUND_WARPS = 1024, 4


@triton.jit
def _group_values(
    scales, offsets, rows, k, OUT, GROUP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr
):
    """Scales and offsets of the outputs `rows` for the group of input k; ones without scales, zeros without offsets."""
    scale, offset = tl.full(rows.shape, 1.0, tl.float32), tl.zeros(rows.shape, tl.float32)
    place = rows.to(tl.int64) + k // GROUP * OUT
    if HAS_SCALES:
        scale = tl.load(scales + place).to(tl.float32)
        if HAS_OFFSETS:
            offset = tl.load(offsets + place).to(tl.float32)
    return scale, offset


@triton.jit
def tile_product(
    x_rows, codes, scales, offsets, levels, rows, first, stop, IN, OUT, codes_stride,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr, IS_PADDED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product [BLOCK_O, BLOCK_T] float32 of the outputs `rows` and the tokens at `x_rows`, over bytes [first, stop) of
    the codes. All of both are read without masks: rows past the end repeat one. A group has whole blocks."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    is_exact: tl.constexpr = dtype == tl.int8
    halves: tl.constexpr = 2 if FORM == "int4" or FORM == "levels4" else 1
    upper = codes_stride * (halves - 1)
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.int32 if is_exact else tl.float32)
    step = tl.arange(0, BLOCK_K)
    codes += rows.to(tl.int64)[:, None] * codes_stride + step[None, :]
    # The few inputs of small tiles, which older instructions multiply, are read in the order of the codes.
    puts_codes_in_order: tl.constexpr = BLOCK_T > 8
    if not puts_codes_in_order:
        step = inputs_of(step, CHUNK)
    k = tl.minimum(first, stop - 1)  # a part may be empty, with its end before its start
    scale, offset = _group_values(scales, offsets, rows, k, OUT, GROUP, HAS_SCALES, HAS_OFFSETS)
    scale_2, offset_2 = _group_values(scales, offsets, rows, k + upper, OUT, GROUP, HAS_SCALES, HAS_OFFSETS)
    for start in tl.range(first, stop, BLOCK_K):
        packed = tl.load(codes + start)
        if puts_codes_in_order:
            packed = in_order(packed, CHUNK)
        # The next block's, since these few bytes are not copied ahead to shared memory as the codes are.
        k = tl.minimum(start + BLOCK_K, stop - 1)
        next_scale, next_offset = _group_values(scales, offsets, rows, k, OUT, GROUP, HAS_SCALES, HAS_OFFSETS)
        next_scale_2, next_offset_2 = _group_values(
            scales, offsets, rows, k + upper, OUT, GROUP, HAS_SCALES, HAS_OFFSETS
        )
        for half in tl.static_range(halves):
            k = start + half * codes_stride
            places = x_rows[None, :] + k + step[:, None]
            if IS_PADDED:
                inputs = tl.load(places, mask=(k + step < IN)[:, None], other=0)
            else:
                inputs = tl.load(places)
            if is_exact:
                sums = tl.dot(packed, inputs, sums, out_dtype=tl.int32)
            else:
                numbers = numbers_of(packed, levels, dtype, half, FORM, ZERO)
                if HAS_SCALES:
                    factor = scale_2 if half else scale
                    sums += tl.dot(numbers, inputs, input_precision="ieee") * factor[:, None]
                    if HAS_OFFSETS:
                        # Tensor cores add inputs faster than threads, which would exchange their sums.
                        inputs_of_group = tl.dot(ones_of(packed, dtype), inputs, input_precision="ieee")
                        added = offset_2 if half else offset
                        sums += inputs_of_group * added[:, None]
                else:
                    sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
        scale, offset, scale_2, offset_2 = next_scale, next_offset, next_scale_2, next_offset_2
    return sums.to(tl.float32)


@triton.jit
def _scaled(
    total, factors, offsets, rounded, rows, wanted, tokens, known, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr
):
    """total [rows, tokens] times the factors of outputs and, with ROUNDED, the scales of inputs."""
    total *= tl.load(factors + rows, mask=wanted, other=0.0)[:, None]
    if ROUNDED > 0:
        if ROUNDED == 2 and HAS_OFFSETS:
            codes = tl.load(rounded + 2 * tokens + 1, mask=known, other=0.0)
            total += tl.load(offsets + rows, mask=wanted, other=0.0)[:, None] * codes[None, :]
        total *= tl.load(rounded + ROUNDED * tokens, mask=known, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["num_tokens", "IN", "OUT"])
def product_kernel(
    x,  # [T, IN], of the dtype, or int8
    rounded,  # [T, ROUNDED] float32: scale of rounded inputs and, if they are int8, sum of their codes
    codes,  # [OUT, codes_stride]
    scales,  # [G, OUT]
    offsets,  # [G, OUT]
    levels,
    factors,  # [OUT]
    bias,  # [OUT]
    residual,  # [T, OUT]
    y,  # [T, OUT]
    sums,  # [PARTS, T, OUT] float32 of a launch in parts, or anything
    arrivals,  # [programs of a part] int32: zeros before and after a launch in parts
    num_tokens, IN, OUT, x_stride, codes_stride, residual_stride, y_stride,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_PADDED: tl.constexpr,  # the codes of a row are more than IN
    ALIGNMENT: tl.constexpr,  # of IN and OUT
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr,  # numbers of a token in `rounded`: 2 of int8, 1 of float8, whose numbers x holds, or 0
    PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # a program has one part; else all
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x Wᵀ + b (+ residual). The order of a sum depends on PARTS and BLOCK_K."""
    IN, OUT = IN // ALIGNMENT * ALIGNMENT, OUT // ALIGNMENT * ALIGNMENT  # so that the compiler knows
    tiles, blocks = tl.cdiv(num_tokens, BLOCK_T), tl.cdiv(OUT, BLOCK_O)
    place = tl.program_id(0) % (blocks * tiles)
    tokens = (place % tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    rows = place // tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    wanted, known = rows < OUT, tokens < num_tokens
    x_rows = x + tl.minimum(tokens, num_tokens - 1) * x_stride
    is_exact: tl.constexpr = x.dtype.element_ty == tl.int8
    width = tl.cdiv(codes_stride, PARTS * BLOCK_K) * BLOCK_K
    mine = tl.program_id(0) // (blocks * tiles)
    total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for index in tl.range(1 if IS_SPLIT else PARTS):
        part = mine + index
        total += tile_product(
            x_rows, codes, scales, offsets, levels, tl.minimum(rows, OUT - 1),
            part * width, tl.minimum(part * width + width, codes_stride), IN, OUT, codes_stride,
            FORM, GROUP, ZERO, HAS_SCALES, HAS_OFFSETS and not is_exact, CHUNK, IS_PADDED, BLOCK_O, BLOCK_T, BLOCK_K,
        )  # fmt: skip
    if IS_SPLIT:
        inside = wanted[:, None] & known[None, :]
        target = sums + tokens[None, :] * OUT + rows[:, None]
        each = num_tokens.to(tl.int64) * OUT
        tl.store(target + mine * each, total, mask=inside)
        if is_last(arrivals + place, PARTS):
            total = _scaled(
                sum_of_parts(target, each, inside, PARTS), factors, offsets, rounded, rows, wanted, tokens, known,
                HAS_OFFSETS, ROUNDED,
            )  # fmt: skip
            store_sums(
                total, y, bias, residual, rows, wanted, tokens, known, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL
            )  # fmt: skip
    else:
        total = _scaled(total, factors, offsets, rounded, rows, wanted, tokens, known, HAS_OFFSETS, ROUNDED)
        store_sums(
            total, y, bias, residual, rows, wanted, tokens, known, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL
        )


@triton.jit
def round_kernel(
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
    tl.store(rounded + 2 * token, scale + 0 * total)  # NaN if an input is not finite
    tl.store(rounded + 2 * token + 1, total)


def default_config(tile: int, bits: int, itemsize: int) -> QuantizedLinearConfig:
    """Default launch config for tiles of `tile` tokens, codes of `bits`, and inputs of `itemsize` bytes."""
    if itemsize == 4:  # without tensor cores
        outputs = 32 if tile < INVARIANT_TILE else 16
        return QuantizedLinearConfig(block_o=outputs, block_k=32, num_warps=4, num_stages=2, programs=256)
    if tile == 8:
        return QuantizedLinearConfig(block_o=32, block_k=128, num_warps=2, num_stages=3, programs=2048)
    if tile > INVARIANT_TILE:
        # Each output of a program saves reading the inputs once more, which are more bytes than the codes.
        stages, programs = (4, 264) if tile == 64 else (3, 132)
        return QuantizedLinearConfig(block_o=128, block_k=64, num_warps=8, num_stages=stages, programs=programs)
    block_k = 128 if tile == 16 else 64
    return QuantizedLinearConfig(block_o=64, block_k=block_k, num_warps=4, num_stages=4, programs=264)


TILES = (8, 16, 32, 64, 128)
"""Tokens of a tile: of few tokens, as drafts of a request are, of some, and of more."""
INVARIANT_TILE = 32
"""Tile of every step if a row must not depend on other rows: it has registers for the sums of all parts too."""
FLOAT32_TILE = 64
"""Largest tile of products in float32, whose sums fill the registers sooner."""


def block_size(config: QuantizedLinearConfig, group: int, chunk: int) -> int:
    """Bytes of a block: a group has whole blocks, and a block whole chunks."""
    return min(max(config.block_k, chunk), group & -group)


def compile_cases() -> list[CompileCase]:
    """Cases of the kernels: forms of each format, with groups longer and shorter than a block, and every tile."""
    from .float8 import float8_cases
    from .triton_dense import dense_cases  # which imports from here

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
        for tile, parts in (
            (TILES[0], 1),
            (TILES[0], 4),
            (TILES[1], 1),
            (INVARIANT_TILE, 4),
            (INVARIANT_TILE, -4),
            (64, 5),
            (64, 1),
            (128, 8),
            (128, 1),
        )
        if tile <= FLOAT32_TILE or form[4] != "fp32"
    ]
    of_few_tokens = (TILES[0], 1), (TILES[0], 4), (TILES[1], 1), (INVARIANT_TILE, 4), (INVARIANT_TILE, -4)
    cases += [_product_case(("fp8", WHOLE, 0, False, "bf16"), tile, parts) for tile, parts in of_few_tokens]
    for dtype in ("bf16", "fp16"):
        types = {"x": f"*{dtype}", "codes": "*i8", "rounded": "*fp32"}
        name = f"quantized_linear round {dtype}"
        cases.append(make_case(name, round_kernel, {"BLOCK": ROUND_BLOCK}, types, num_warps=ROUND_WARPS))
    return [*cases, *dense_cases(), *float8_cases()]


_FEW_REGISTERS = {
    ("levels4", "bf16", 64): (90, 100),
    ("levels4", "bf16", 128): (90, 100),
    ("int4", "fp16", 32): (90, 100),
    ("int4", "fp16", 128): (90, 100),
}
"""Architectures of cases for which registers are enough; on the third they spill 8 to 120 bytes of a thread, which
costs time."""


def _product_case(form: tuple[str, int, int, bool, str], tile: int, parts: int) -> CompileCase:
    """Case of a product; negative `parts`: all in one program."""
    kind, group, zero, has_offsets, dtype = form
    has_scales = dtype != "i8" and (group < WHOLE or has_offsets)
    config = default_config(tile, 4 if kind.endswith("4") else 8, {"fp32": 4, "i8": 1}.get(dtype, 2))
    chunk = 1 if dtype in ("fp32", "i8") else chunk_of(group)
    constants = {
        "FORM": kind, "GROUP": group, "ZERO": zero, "HAS_SCALES": has_scales, "HAS_OFFSETS": has_offsets,
        "CHUNK": chunk, "IS_PADDED": group == 32, "ALIGNMENT": 16, "HAS_BIAS": has_offsets, "HAS_RESIDUAL": parts < 4,
        "ROUNDED": 2 if dtype == "i8" else int((kind, dtype, group) == ("fp8", "bf16", WHOLE)),
        "PARTS": abs(parts), "IS_SPLIT": parts > 1,
        "BLOCK_O": config.block_o, "BLOCK_T": tile, "BLOCK_K": block_size(config, group, chunk),
    }  # fmt: skip
    table = "*fp32" if dtype in ("fp32", "i8") or not has_scales else "*fp16"
    own = "*bf16" if dtype == "i8" else f"*{dtype}"
    types = {
        "x": f"*{dtype}", "codes": "*i8" if kind == "int8" else "*u8", "scales offsets": table,
        "rounded factors": "*fp32", "levels": f"*{dtype}", "bias residual y": own, "sums": "*fp32", "arrivals": "*i32",
    }  # fmt: skip
    name = f"quantized_linear {kind} g{0 if group == WHOLE else group} {dtype} tile{tile} parts{parts}"
    archs = _FEW_REGISTERS.get((kind, dtype, tile), (80, 90, 100))
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "archs": archs}
    return make_case(name, product_kernel, constants, types, **launch)
