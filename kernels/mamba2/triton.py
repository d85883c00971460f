"""Recurrence of Mamba-2 on GPUs.

Decodes and verified drafts are computed token by token: a program holds some columns of the state of a row's head.
Longer rows are computed in chunks, as products of matrices (section 6): one launch carries the states from chunk to
chunk, and one computes the results of all chunks. States are stored where the plan writes them. A norm needs all
columns of a token, so another launch gates and normalises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..state_plan import CHUNK, MAX_TOKENS, StatePlan
from ..state_rows import softplus, store_state, writes_of

if TYPE_CHECKING:
    from . import MixerWeights, Projected

_COLUMNS = 16
"""Columns of a state in a program that computes token by token: 256 rows of them are 32 registers of a thread."""
_CHUNK_COLUMNS = 32
"""Columns of a state in a program that computes chunks."""
_ROWS = 16
"""Rows of a state in a program that carries it from chunk to chunk, and rows that others multiply at a time."""


@triton.jit(do_not_specialize=["num_rows"])
def _step_kernel(
    mixed,  # [T, H * P + 2 * J * N]
    step,  # [T, H]
    rate,  # [H] float32
    step_bias,  # [H] float32
    skip,  # [H] float32
    table,  # StatePlan.table
    states,  # [S, H, N, P] float32
    out,  # [T, H, P] float32
    least,
    most,
    num_rows,
    mixed_stride,
    step_stride,
    heads,
    groups,
    state_dim,
    head_dim,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    elements, columns = tl.arange(0, N), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_element, is_column = elements < state_dim, columns < head_dim
    inside = is_element[:, None] & is_column[None, :]
    size = state_dim * head_dim
    places = states + head * size + elements[:, None] * head_dim + columns[None, :]
    first, end = tl.load(table + row), tl.load(table + row + 1)
    offsets, slots, write, last_write = writes_of(table, num_rows, row)
    state = tl.load(places + tl.load(table + num_rows + 1 + row) * heads * size, mask=inside, other=0.0)
    speed, bias, direct = tl.load(rate + head), tl.load(step_bias + head), tl.load(skip + head)
    of_group = heads * head_dim + head // (heads // groups) * state_dim + elements
    for token in range(first, end):
        inputs = mixed + token * mixed_stride
        x = tl.load(inputs + head * head_dim + columns, mask=is_column, other=0.0).to(tl.float32)
        b = tl.load(inputs + of_group, mask=is_element, other=0.0).to(tl.float32)
        c = tl.load(inputs + of_group + groups * state_dim, mask=is_element, other=0.0).to(tl.float32)
        dt = softplus(tl.load(step + token * step_stride + head).to(tl.float32) + bias)
        dt = tl.minimum(tl.maximum(dt, least), most)
        state = state * tl.exp(speed * dt) + b[:, None] * (x * dt)[None, :]
        y = tl.sum(state * c[:, None], axis=0) + direct * x
        tl.store(out + (token * heads + head) * head_dim + columns, y, mask=is_column)
        write = store_state(places, state, inside, heads * size, offsets, slots, write, last_write, token - first + 1)


@triton.jit
def _steps(step, begin, count, head, rate, step_bias, least, most, step_stride, CHUNK: tl.constexpr):
    """dt of a chunk's tokens, and the sum of log decays up to each; tokens after its `count` leave a state as it is."""
    tokens = tl.arange(0, CHUNK)
    given = tl.load(step + (begin + tokens) * step_stride + head, mask=tokens < count, other=0.0).to(tl.float32)
    dt = tl.minimum(tl.maximum(softplus(given + tl.load(step_bias + head)), least), most)
    dt = tl.where(tokens < count, dt, 0.0)
    return dt, tl.cumsum(tl.load(rate + head) * dt, 0)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _carry_kernel(
    mixed,  # [T, H * P + 2 * J * N]
    step,  # [T, H]
    rate,  # [H] float32
    step_bias,  # [H] float32
    table,  # StatePlan.table
    chunks,  # StatePlan.chunks
    states,  # [S, H, N, P] float32
    before,  # [chunks, H, N, P] float32: states that chunks start with
    least,
    most,
    num_rows,
    num_chunks,
    mixed_stride,
    step_stride,
    heads,
    groups,
    state_dim,
    head_dim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(head_dim, COLUMNS)
    elements = tl.program_id(2) // blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    tokens = tl.arange(0, CHUNK)
    is_element, is_column = elements < state_dim, columns < head_dim
    inside = is_element[:, None] & is_column[None, :]
    places = head * state_dim * head_dim + elements[:, None] * head_dim + columns[None, :]
    stride = heads * state_dim * head_dim
    first = tl.load(table + row)
    offsets, slots, write, last_write = writes_of(table, num_rows, row)
    state = tl.load(states + tl.load(table + num_rows + 1 + row) * stride + places, mask=inside, other=0.0)
    of_group = heads * head_dim + head // (heads // groups) * state_dim + elements
    row_chunks = chunks + 2 * num_chunks + row
    for chunk in range(tl.load(row_chunks), tl.load(row_chunks + 1)):
        tl.store(before + chunk * stride + places, state, mask=inside)
        begin, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
        dt, total = _steps(step, begin, count, head, rate, step_bias, least, most, step_stride, CHUNK)
        whole = tl.sum(tl.where(tokens == CHUNK - 1, total, 0.0), 0)
        is_token = tokens < count
        inputs = mixed + (begin + tokens) * mixed_stride
        x = inputs[:, None] + head * head_dim + columns[None, :]
        x = tl.load(x, mask=is_token[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        added = x * (dt * tl.exp(whole - total))[:, None]
        b = inputs[None, :] + of_group[:, None]  # transposed
        b = tl.load(b, mask=is_element[:, None] & is_token[None, :], other=0.0).to(tl.float32)
        state = tl.dot(b, added, state * tl.exp(whole), input_precision=PRECISION)
        write = store_state(
            states + places, state, inside, stride, offsets, slots, write, last_write, begin + count - first
        )


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(
    mixed,  # [T, H * P + 2 * J * N]
    step,  # [T, H]
    rate,  # [H] float32
    step_bias,  # [H] float32
    skip,  # [H] float32
    chunks,  # StatePlan.chunks
    before,  # [chunks, H, N, P] float32
    out,  # [T, H, P] float32
    least,
    most,
    num_chunks,
    mixed_stride,
    step_stride,
    heads,
    groups,
    state_dim,
    head_dim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, tokens = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    begin, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
    is_token, is_column = tokens < count, columns < head_dim
    inputs = mixed + (begin + tokens) * mixed_stride
    of_group = heads * head_dim + head // (heads // groups) * state_dim
    products = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    y = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    for first in range(0, state_dim, ROWS):
        elements = first + tl.arange(0, ROWS)
        is_element = elements < state_dim
        b = inputs[None, :] + (of_group + elements)[:, None]  # transposed
        b = tl.load(b, mask=is_element[:, None] & is_token[None, :], other=0.0).to(tl.float32)
        c = inputs[:, None] + (of_group + groups * state_dim + elements)[None, :]
        c = tl.load(c, mask=is_token[:, None] & is_element[None, :], other=0.0).to(tl.float32)
        state = before + ((chunk * heads + head) * state_dim + elements[:, None]) * head_dim + columns[None, :]
        state = tl.load(state, mask=is_element[:, None] & is_column[None, :], other=0.0)
        products = tl.dot(c, b, products, input_precision=PRECISION)
        y = tl.dot(c, state, y, input_precision=PRECISION)
    dt, total = _steps(step, begin, count, head, rate, step_bias, least, most, step_stride, CHUNK)
    between = tl.where(tokens[:, None] >= tokens[None, :], total[:, None] - total[None, :], float("-inf"))
    inside = is_token[:, None] & is_column[None, :]
    x = tl.load(inputs[:, None] + head * head_dim + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y = y * tl.exp(total)[:, None] + tl.load(skip + head) * x
    y = tl.dot(products * tl.exp(between), x * dt[:, None], y, input_precision=PRECISION)
    tl.store(out + ((begin + tokens)[:, None] * heads + head) * head_dim + columns[None, :], y, mask=inside)


@triton.jit
def _gate_kernel(
    x,  # [T, J, width] float32
    gate,  # [T, J * width]
    scale,  # [J * width] float32; unused without a norm
    y,  # [T, J, width]
    eps,
    gate_stride,
    width,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_BEFORE_GATE: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    place = (token * tl.num_programs(1) + group) * width + columns
    value = tl.load(x + place, mask=inside, other=0.0)
    opened = tl.load(gate + token * gate_stride + group * width + columns, mask=inside, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if not IS_BEFORE_GATE:
        value *= opened
    if HAS_NORM:
        factors = tl.load(scale + group * width + columns, mask=inside, other=0.0)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps) * factors
    if IS_BEFORE_GATE:
        value *= opened
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


def serves(states: Tensor) -> bool:
    """True when registers hold the states of `_step_kernel`."""
    return states.shape[2] <= 256


def mamba2(inputs: Projected, weights: MixerWeights, plan: StatePlan, states: Tensor) -> Tensor:
    """See `kernels.mamba2.mamba2`; `serves` must be True."""
    mixed, gate, step = (part if part.stride(1) == 1 else part.contiguous() for part in inputs)
    _, heads, state_dim, head_dim = states.shape
    results = torch.empty((len(mixed), heads * head_dim), dtype=torch.float32, device=mixed.device)
    vectors, limits = (mixed, step, weights.rate, weights.step_bias), weights.limits
    sizes = (mixed.stride(0), step.stride(0), heads, weights.groups, state_dim, head_dim)
    if plan.longest <= MAX_TOKENS:
        _step_kernel[(plan.num_rows, heads, triton.cdiv(head_dim, _COLUMNS))](
            *(*vectors, weights.skip, plan.table, states, results, *limits, plan.num_rows, *sizes),
            N=triton.next_power_of_2(state_dim),
            COLUMNS=_COLUMNS,
        )
        return _gated(results, gate, weights, mixed.dtype)
    before = states.new_empty((plan.num_chunks, heads, state_dim, head_dim))
    constants = {"CHUNK": CHUNK, "PRECISION": _precision(mixed.dtype == torch.float32)}
    blocks = triton.cdiv(state_dim, _ROWS) * triton.cdiv(head_dim, _CHUNK_COLUMNS)
    _carry_kernel[(plan.num_rows, heads, blocks)](
        *(*vectors, plan.table, plan.chunks, states, before, *limits, plan.num_rows, plan.num_chunks, *sizes),
        **{"ROWS": _ROWS, "COLUMNS": _CHUNK_COLUMNS, **constants},
        num_stages=1,
    )
    _scan_kernel[(plan.num_chunks, heads, triton.cdiv(head_dim, _CHUNK_COLUMNS))](
        *(*vectors, weights.skip, plan.chunks, before, results, *limits, plan.num_chunks, *sizes),
        **{"ROWS": _ROWS, "COLUMNS": _CHUNK_COLUMNS, **constants},
    )
    return _gated(results, gate, weights, mixed.dtype)


def _precision(is_float32: bool) -> str:
    """Precision of products: TF32 has all bits of bfloat16 and float16; three such products have float32's."""
    return "tf32x3" if is_float32 else "tf32"


def _gated(results: Tensor, gate: Tensor, weights: MixerWeights, dtype: torch.dtype) -> Tensor:
    norm, (tokens, size) = weights.norm, results.shape
    width = size // weights.groups
    out = torch.empty((tokens, size), dtype=dtype, device=results.device)
    _gate_kernel[(tokens, weights.groups)](
        *(results, gate, results if norm is None else norm.scale, out),
        *(0.0 if norm is None else norm.eps, gate.stride(0), width),
        WIDTH=triton.next_power_of_2(width),
        HAS_NORM=norm is not None,
        IS_BEFORE_GATE=norm is not None and norm.is_before_gate,
        num_warps=_gate_warps(width),
    )
    return out


def _gate_warps(width: int) -> int:
    return 4 if width <= 2048 else 8 if width <= 4096 else 16


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels: published sizes, and small ones; each dtype."""
    cases = []
    for dtype, size in (("bf16", 128), ("fp16", 64), ("fp32", 256)):
        shared = {"mixed step": f"*{dtype}", "rate step_bias": "*fp32", "least most": "fp32"}
        types = shared | {"skip states out": "*fp32", "table": "*i64"}
        cases.append(make_case(f"mamba2 {dtype} n{size}", _step_kernel, {"N": size, "COLUMNS": _COLUMNS}, types))
        constants = {"COLUMNS": _CHUNK_COLUMNS, "CHUNK": CHUNK, "PRECISION": _precision(dtype == "fp32")}
        types = shared | {"states before": "*fp32", "table chunks": "*i64"}
        rows = {"ROWS": _ROWS}
        cases.append(make_case(f"mamba2 carry {dtype}", _carry_kernel, constants | rows, types, num_stages=1))
        types, rows = shared | {"skip before out": "*fp32", "chunks": "*i64"}, {"ROWS": _ROWS}
        cases.append(make_case(f"mamba2 scan {dtype}", _scan_kernel, constants | rows, types))
    for dtype, width, has_norm in (("bf16", 1024, True), ("fp16", 8192, True), ("fp32", 4096, False)):
        constants = {"WIDTH": width, "HAS_NORM": has_norm, "IS_BEFORE_GATE": dtype == "fp16"}
        types = {"x scale": "*fp32", "gate y": f"*{dtype}", "eps": "fp32"}
        warps = {"num_warps": _gate_warps(width)}
        cases.append(make_case(f"mamba2 gate {dtype} w{width}", _gate_kernel, constants, types, **warps))
    return cases
