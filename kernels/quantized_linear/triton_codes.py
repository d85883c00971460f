"""Numbers of codes, made in registers of a few instructions for several codes at a time.

A product with a quantised weight of few tokens is limited by these instructions before it is by memory. The compiler
makes each number by itself, so that for the forms of most models the instructions are written out here: two for four
codes, where a register holds two numbers. The interpreter, and products in float32, take plain operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(16)
"""Numbers that one instruction of a tensor core takes of a row of 16-bit numbers."""

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


def _nibbles(half: int, is_bfloat16: bool, zero: int) -> str:
    """Instructions for the lower or upper halves of 4 bytes less `zero`: a byte under the bits of 128 (bfloat16) or of
    1024 (float16) is the sum of both, and an exact difference follows."""
    large, one, kind = (0x4300, 0x3F80, "bf16x2") if is_bfloat16 else (0x6400, 0x3C00, "f16x2")
    shift = "shr.b32 t, $2, 4; and.b32 t, t" if half else "and.b32 t, $2"
    both = 0x10001
    return f"""{{ .reg .b32 t, one, less;
        mov.b32 one, {one * both}; mov.b32 less, {(0x8000 | large | zero) * both};
        {shift}, 0x0F0F0F0F;
        prmt.b32 $0, t, {(large >> 8) * 0x1010101}, 0x4140; fma.rn.{kind} $0, $0, one, less;
        prmt.b32 $1, t, {(large >> 8) * 0x1010101}, 0x4342; fma.rn.{kind} $1, $1, one, less; }}"""


_NIBBLES = tl.constexpr(
    tuple(_nibbles(half, is_bfloat16, zero) for is_bfloat16 in (False, True) for half in (0, 1) for zero in (0, 8))
)


def _float8(target: str, two: str) -> str:
    return f"""shr.b32 t, {two}, 4; and.b32 t, t, 0x07F007F0;
        lop3.b32 t, {two}, 0x80008000, t, 0xEA; fma.rn.bf16x2 {target}, t, power, zero;"""


_FLOAT8 = tl.constexpr(
    # The codes are read before a result is written, which may have their register.
    f"""{{ .reg .b32 t, low, high, power, zero; mov.b32 power, 0x7B807B80; mov.b32 zero, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424;
    {_float8("$0", "low")} {_float8("$1", "high")} }}"""
)


@triton.jit
def numbers_of(packed, levels, dtype: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr):
    """Numbers of codes less ZERO, in `dtype`, which holds them exactly. HALF: the codes in the upper halves of bytes.

    Of FP8: a number whose exponent is too small by the difference of both biases; its product with a power of two is
    exact, also of subnormals.
    """
    is_narrow: tl.constexpr = dtype == tl.float16 or dtype == tl.bfloat16
    if FORM == "int4" and _IS_COMPILED and is_narrow and (ZERO == 0 or ZERO == 8):
        if dtype == tl.bfloat16:
            code: tl.constexpr = _NIBBLES[4 + 2 * HALF + (ZERO == 8)]
            numbers = tl.inline_asm_elementwise(code, "=r,=r,r", [packed], tl.bfloat16, True, 4)
        else:
            of_float16: tl.constexpr = _NIBBLES[2 * HALF + (ZERO == 8)]
            numbers = tl.inline_asm_elementwise(of_float16, "=r,=r,r", [packed], tl.float16, True, 4)
    elif FORM == "fp8" and _IS_COMPILED and dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(_FLOAT8, "=r,=r,r", [packed], tl.bfloat16, True, 4)
    else:
        numbers = _plain_numbers(packed, levels, dtype, HALF, FORM, ZERO)
    return numbers


_ONES_BFLOAT16, _ONES_FLOAT16 = (
    tl.constexpr(f"mov.b32 $0, {two}; mov.b32 $1, {two};") for two in ("0x3F803F80", "0x3C003C00")
)


@triton.jit
def ones_of(packed, dtype: tl.constexpr):
    """Ones in `dtype` for each of `packed`. They seem to be made of it, so that a product with them takes the other
    operand in the same order as a product with the codes' numbers."""
    if _IS_COMPILED and dtype == tl.bfloat16:
        ones = tl.inline_asm_elementwise(_ONES_BFLOAT16, "=r,=r,r", [packed], tl.bfloat16, True, 4)
    elif _IS_COMPILED and dtype == tl.float16:
        ones = tl.inline_asm_elementwise(_ONES_FLOAT16, "=r,=r,r", [packed], tl.float16, True, 4)
    else:
        ones = tl.full(packed.shape, 1.0, dtype)
    return ones


@triton.jit
def _plain_numbers(packed, levels, dtype: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr):
    """`numbers_of` by plain operations; a number of 4 bits is the mantissa of one from 16 on."""
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
def in_order(packed, CHUNK: tl.constexpr):
    """Codes [rows, bytes] in the order of the inputs. Threads exchange nothing: each has those of Hopper's operand."""
    if CHUNK > 1:
        rows: tl.constexpr = packed.shape[0]
        chunks: tl.constexpr = packed.shape[1] // CHUNK
        packed = packed.reshape(rows, chunks, 4, CHUNK // STEP, 2, 2).permute(0, 1, 3, 4, 2, 5)
        packed = packed.reshape(rows, chunks * CHUNK)
    return packed


@triton.jit
def inputs_of(index, CHUNK: tl.constexpr):
    """Inputs that the bytes at `index` of a row of codes belong to."""
    inputs = index
    if CHUNK > 1:
        within = index % CHUNK
        thread = within // (CHUNK // 4)
        rest = within % (CHUNK // 4)
        inputs = index - within + rest // 4 * STEP + rest // 2 % 2 * 8 + thread * 2 + rest % 2
        inputs = tl.max_contiguous(tl.multiple_of(inputs, 2), 2)
    return inputs
