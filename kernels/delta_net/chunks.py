"""Gated delta rule of long rows on GPUs, in chunks whose updates are one triangular system (section 3.3).

With the state S before a chunk, c[i] = exp(g[1] + ... + g[i]), c[i, j] = c[i] / c[j], and L the chunk's last token:

    M = (I + A)⁻¹, A[i, j] = b[i] c[i, j] (k[i] · k[j]) for j < i
    d = M (b (v - c S^T k)), S' = c[L] S + sum of c[L, i] k[i] d[i]ᵀ
    S[i]ᵀ q[i] = c[i] Sᵀ q[i] + sum over j <= i of c[i, j] (q[i] · k[j]) d[j]

Three launches: M of each chunk, the states from chunk to chunk, and the results of each chunk. Keys and queries are
multiplied as they are, and their norms divided out of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor, float32

from ..compile_case import CompileCase, make_case
from ..state_plan import CHUNK, StatePlan
from ..state_rows import softplus, store_state, writes_of

if TYPE_CHECKING:
    from . import DeltaWeights

_PIECE = 32
"""Rows of a state that are multiplied at a time."""
_SMALL_PIECE = 16
"""The same in float32, and for `_read_kernel`, which has two sums of products in registers."""
_COLUMNS = 32
"""Columns of a state in a program."""


@triton.jit
def _gates(
    beta, decay, rate, rate_bias, begin, count, head, beta_scale, beta_stride, decay_stride, CHUNK: tl.constexpr
):
    """b of a chunk's tokens, and the sum of g up to each; tokens after its `count` leave a state as it is."""
    tokens = tl.arange(0, CHUNK)
    given = tl.load(decay + (begin + tokens) * decay_stride + head, mask=tokens < count, other=0.0).to(tl.float32)
    log_decay = -tl.load(rate + head) * softplus(given + tl.load(rate_bias + head))
    given = tl.load(beta + (begin + tokens) * beta_stride + head, mask=tokens < count, other=0.0).to(tl.float32)
    strength = tl.where(tokens < count, beta_scale * tl.sigmoid(given), 0.0)
    return strength, tl.cumsum(tl.where(tokens < count, log_decay, 0.0), 0)


@triton.jit
def _vectors(mixed, begin, count, first, size, stride, PIECE: tl.constexpr, CHUNK: tl.constexpr):
    """Elements [CHUNK, PIECE] from `first` on of the queries or keys of a chunk, `size` of which are left."""
    tokens, elements = tl.arange(0, CHUNK), tl.arange(0, PIECE)
    inside = (tokens < count)[:, None] & (elements < size)[None, :]
    places = mixed + (begin + tokens)[:, None] * stride + first + elements[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_chunks"])
def _solve_kernel(
    mixed,  # [T, 2 * G * D + H * V]
    beta,  # [T, H]
    decay,  # [T, H]
    rate,  # [H] float32
    rate_bias,  # [H] float32
    chunks,  # StatePlan.chunks
    inverse,  # [chunks, H, CHUNK, CHUNK] float32
    epsilon,
    beta_scale,
    num_chunks,
    mixed_stride,
    beta_stride,
    decay_stride,
    heads,
    key_heads,
    key_dim,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tl.arange(0, CHUNK)
    begin, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
    keys = (key_heads + head // (heads // key_heads)) * key_dim
    products = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    squares = tl.zeros((CHUNK,), dtype=tl.float32)
    for first in range(0, key_dim, PIECE):
        key = _vectors(mixed, begin, count, keys + first, key_dim - first, mixed_stride, PIECE, CHUNK)
        products = tl.dot(key, tl.trans(key), products, input_precision=PRECISION)
        squares += tl.sum(key * key, axis=1)
    unit = tl.rsqrt(squares + epsilon)
    strength, total = _gates(
        beta, decay, rate, rate_bias, begin, count, head, beta_scale, beta_stride, decay_stride, CHUNK
    )
    earlier = tokens[:, None] < tokens[None, :]  # A is transposed: its rows are columns here
    between = tl.exp(tl.where(earlier, total[None, :] - total[:, None], float("-inf")))
    system = products * unit[:, None] * (unit * strength)[None, :] * between
    solved = tl.where(tokens[:, None] == tokens[None, :], 1.0, 0.0)
    for i in range(1, count):  # forward substitution
        factors = tl.sum(tl.where(tokens[None, :] == i, system, 0.0), axis=1)
        solved -= tl.where(tokens[:, None] == i, tl.sum(factors[:, None] * solved, axis=0)[None, :], 0.0)
    places = ((chunk * heads + head) * CHUNK + tokens[:, None]) * CHUNK + tokens[None, :]
    tl.store(inverse + places, solved)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _carry_kernel(
    mixed,  # [T, 2 * G * D + H * V]
    beta,  # [T, H]
    decay,  # [T, H]
    rate,  # [H] float32
    rate_bias,  # [H] float32
    table,  # StatePlan.table
    chunks,  # StatePlan.chunks
    inverse,  # [chunks, H, CHUNK, CHUNK] float32
    states,  # [S, H, D, V] float32
    before,  # [chunks, H, D, V] float32: states that chunks start with
    deltas,  # [T, H, V] float32: d
    epsilon,
    beta_scale,
    num_rows,
    num_chunks,
    mixed_stride,
    beta_stride,
    decay_stride,
    heads,
    key_heads,
    key_dim,
    value_dim,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    tokens, columns = tl.arange(0, CHUNK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < value_dim
    stride = heads * key_dim * value_dim
    offsets, slots, write, last_write = writes_of(table, num_rows, row)
    first, source = tl.load(table + row), tl.load(table + num_rows + 1 + row)
    keys = (key_heads + head // (heads // key_heads)) * key_dim
    values = 2 * key_heads * key_dim + head * value_dim
    elements = tl.arange(0, PIECE)
    row_chunks = chunks + 2 * num_chunks + row
    first_chunk, end_chunk = tl.load(row_chunks), tl.load(row_chunks + 1)
    for piece in range(0, key_dim, PIECE):
        places = (head * key_dim + piece + elements[:, None]) * value_dim + columns[None, :]
        inside = (elements < key_dim - piece)[:, None] & is_column[None, :]
        state = tl.load(states + source * stride + places, mask=inside, other=0.0)
        tl.store(before + first_chunk * stride + places, state, mask=inside)
    for chunk in range(first_chunk, end_chunk):
        tl.debug_barrier()  # other threads have written the chunk's state
        begin, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
        known = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
        squares = tl.zeros((CHUNK,), dtype=tl.float32)
        for piece in range(0, key_dim, PIECE):
            places = (head * key_dim + piece + elements[:, None]) * value_dim + columns[None, :]
            inside = (elements < key_dim - piece)[:, None] & is_column[None, :]
            state = tl.load(before + chunk * stride + places, mask=inside, other=0.0)
            key = _vectors(mixed, begin, count, keys + piece, key_dim - piece, mixed_stride, PIECE, CHUNK)
            known = tl.dot(key, state, known, input_precision=PRECISION)
            squares += tl.sum(key * key, axis=1)
        unit = tl.rsqrt(squares + epsilon)
        strength, total = _gates(
            beta, decay, rate, rate_bias, begin, count, head, beta_scale, beta_stride, decay_stride, CHUNK
        )
        has_value = (tokens < count)[:, None] & is_column[None, :]
        value = mixed + (begin + tokens)[:, None] * mixed_stride + values + columns[None, :]
        value = tl.load(value, mask=has_value, other=0.0).to(tl.float32)
        side = strength[:, None] * (value - (tl.exp(total) * unit)[:, None] * known)
        solved = ((chunk * heads + head) * CHUNK + tokens[:, None]) * CHUNK + tokens[None, :]
        delta = tl.dot(tl.load(inverse + solved), side, input_precision=PRECISION)
        target = deltas + ((begin + tokens)[:, None] * heads + head) * value_dim + columns[None, :]
        tl.store(target, delta, mask=has_value)
        whole = tl.sum(tl.where(tokens == CHUNK - 1, total, 0.0), 0)  # rounded as the sums of the last tokens
        delta *= (tl.exp(whole - total) * unit)[:, None]
        end = write
        for piece in range(0, key_dim, PIECE):
            places = (head * key_dim + piece + elements[:, None]) * value_dim + columns[None, :]
            inside = (elements < key_dim - piece)[:, None] & is_column[None, :]
            state = tl.load(before + chunk * stride + places, mask=inside, other=0.0) * tl.exp(whole)
            key = _vectors(mixed, begin, count, keys + piece, key_dim - piece, mixed_stride, PIECE, CHUNK)
            state = tl.dot(tl.trans(key), delta, state, input_precision=PRECISION)
            if chunk + 1 < end_chunk:
                tl.store(before + (chunk + 1) * stride + places, state, mask=inside)
            length = begin + count - first
            end = store_state(states + places, state, inside, stride, offsets, slots, write, last_write, length)
        write = end


@triton.jit(do_not_specialize=["num_chunks"])
def _read_kernel(
    mixed,  # [T, 2 * G * D + H * V]
    beta,  # [T, H]
    decay,  # [T, H]
    rate,  # [H] float32
    rate_bias,  # [H] float32
    chunks,  # StatePlan.chunks
    before,  # [chunks, H, D, V] float32
    deltas,  # [T, H, V] float32
    out,  # [T, H, V] float32
    scale,  # of queries
    epsilon,
    num_chunks,
    mixed_stride,
    beta_stride,
    decay_stride,
    heads,
    key_heads,
    key_dim,
    value_dim,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, tokens = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    begin, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
    is_column = columns < value_dim
    queries = head // (heads // key_heads) * key_dim
    keys = key_heads * key_dim + queries
    products = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    result = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    query_squares, key_squares = tl.zeros((CHUNK,), dtype=tl.float32), tl.zeros((CHUNK,), dtype=tl.float32)
    for first in range(0, key_dim, PIECE):
        query = _vectors(mixed, begin, count, queries + first, key_dim - first, mixed_stride, PIECE, CHUNK)
        key = _vectors(mixed, begin, count, keys + first, key_dim - first, mixed_stride, PIECE, CHUNK)
        elements = first + tl.arange(0, PIECE)
        state = before + ((chunk * heads + head) * key_dim + elements[:, None]) * value_dim + columns[None, :]
        state = tl.load(state, mask=(elements < key_dim)[:, None] & is_column[None, :], other=0.0)
        products = tl.dot(query, tl.trans(key), products, input_precision=PRECISION)
        result = tl.dot(query, state, result, input_precision=PRECISION)
        query_squares += tl.sum(query * query, axis=1)
        key_squares += tl.sum(key * key, axis=1)
    unit = tl.rsqrt(query_squares + epsilon) * scale
    _, total = _gates(beta, decay, rate, rate_bias, begin, count, head, 1.0, beta_stride, decay_stride, CHUNK)
    between = tl.where(tokens[:, None] >= tokens[None, :], total[:, None] - total[None, :], float("-inf"))
    products *= unit[:, None] * tl.rsqrt(key_squares + epsilon)[None, :] * tl.exp(between)
    inside = (tokens < count)[:, None] & is_column[None, :]
    places = ((begin + tokens)[:, None] * heads + head) * value_dim + columns[None, :]
    delta = tl.load(deltas + places, mask=inside, other=0.0)
    result = tl.dot(products, delta, result * (tl.exp(total) * unit)[:, None], input_precision=PRECISION)
    tl.store(out + places, result, mask=inside)


def compute(
    inputs: Sequence[Tensor], weights: DeltaWeights, plan: StatePlan, states: Tensor, results: Tensor, epsilon: float
) -> None:
    """Fill `results` [T, H, V] float32 with S[t]ᵀ q[t], and write the `states` [S, H, D, V].

    `inputs`: mixed, beta and decay of `kernels.delta_net.Projected`, whose elements are consecutive in a row.
    `epsilon`: that of the norms of queries and keys.
    """
    rate, rate_bias, key_heads, beta_scale = weights.rate, weights.rate_bias, weights.key_heads, weights.beta_scale
    _, heads, key_dim, value_dim = states.shape
    chunks, count = plan.chunks, plan.num_chunks
    shared, strides = (*inputs, rate, rate_bias), [part.stride(0) for part in inputs]
    inverse = states.new_empty((count, heads, CHUNK, CHUNK))
    before, deltas = states.new_empty((count, *states.shape[1:])), states.new_empty(results.shape)
    constants, sizes = _constants(inputs[0].dtype == float32), (heads, key_heads, key_dim)
    _solve_kernel[(count, heads)](
        *(*shared, chunks, inverse, epsilon, beta_scale, count, *strides, *sizes), **constants, num_stages=1
    )
    carried, warps = _carry_sizes(inputs[0].dtype == float32)
    _carry_kernel[(plan.num_rows, heads, triton.cdiv(value_dim, carried))](
        *(*shared, plan.table, chunks, inverse, states, before, deltas, epsilon, beta_scale, plan.num_rows, count),
        *(*strides, *sizes, value_dim),
        **{"COLUMNS": carried, **constants},
        num_warps=warps,
        num_stages=1,
    )
    _read_kernel[(count, heads, triton.cdiv(value_dim, _COLUMNS))](
        *(*shared, chunks, before, deltas, results, key_dim**-0.5, epsilon, count, *strides, *sizes, value_dim),
        **{"COLUMNS": _COLUMNS, **constants, "PIECE": _SMALL_PIECE},
        num_warps=8,
        num_stages=1,
    )


def _carry_sizes(is_float32: bool) -> tuple[int, int]:
    """Columns of a state in a program of `_carry_kernel`, and its warps: products of float32 need three times as many
    registers, and no other sizes spill none on Hopper."""
    return (16, 4) if is_float32 else (_COLUMNS, 8)


def _constants(is_float32: bool) -> dict[str, object]:
    """Constants of all kernels. TF32 has all bits of bfloat16 and float16; three such products have float32's."""
    precision = "tf32x3" if is_float32 else "tf32"
    return {"PIECE": _SMALL_PIECE if is_float32 else _PIECE, "CHUNK": CHUNK, "PRECISION": precision}


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels, each dtype."""
    cases = []
    for dtype in ("bf16", "fp16", "fp32"):
        constants = _constants(dtype == "fp32")
        shared = {"mixed beta decay": f"*{dtype}", "rate rate_bias": "*fp32", "chunks": "*i64", "epsilon": "fp32"}
        types = shared | {"inverse": "*fp32", "beta_scale": "fp32"}
        cases.append(make_case(f"delta_net solve {dtype}", _solve_kernel, constants, types, num_stages=1))
        types |= {"table": "*i64", "states before deltas": "*fp32"}
        carried, warps = _carry_sizes(dtype == "fp32")
        constants |= {"COLUMNS": carried}
        carry = make_case(f"delta_net carry {dtype}", _carry_kernel, constants, types, num_warps=warps, num_stages=1)
        cases.append(carry)
        types = shared | {"before deltas out": "*fp32", "scale": "fp32"}
        constants |= {"COLUMNS": _COLUMNS, "PIECE": _SMALL_PIECE}
        cases.append(make_case(f"delta_net read {dtype}", _read_kernel, constants, types, num_warps=8, num_stages=1))
    return cases
