"""Gated delta rule of decodes and verified drafts on GPUs: a program holds some columns of the state of a row's head.

Its tokens follow one another in registers; the state is stored where the plan writes it. Longer rows are computed in
chunks (`chunks.py`), or in PyTorch if each element of a key has a decay of its own. The norm needs all columns of a
token, so another launch computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..state_plan import MAX_TOKENS, StatePlan
from ..state_rows import softplus, store_state, writes_of
from . import chunks
from .torch import EPS

if TYPE_CHECKING:
    from . import DeltaWeights, Projected

_COLUMNS = 16
"""Columns of a state in a program: 256 rows of them are 32 registers of a thread."""


@triton.jit
def _unit(x, epsilon):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + epsilon)


@triton.jit(do_not_specialize=["num_rows"])
def _rule_kernel(
    mixed,  # [T, 2 * G * D + H * V]
    beta,  # [T, H]
    decay,  # [T, H], or [T, H * D] by element
    rate,  # [H] float32
    rate_bias,  # [H] or [H * D] float32
    table,  # StatePlan.table
    states,  # [S, H, D, V] float32
    out,  # [T, H, V] float32
    scale,  # of queries
    epsilon,
    beta_scale,
    num_rows,
    mixed_stride,
    beta_stride,
    decay_stride,
    heads,
    key_heads,
    key_dim,
    value_dim,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    keys, columns = tl.arange(0, D), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = keys < key_dim, columns < value_dim
    inside = is_key[:, None] & is_column[None, :]
    stride = heads * key_dim * value_dim
    places = states + (head * key_dim + keys[:, None]) * value_dim + columns[None, :]
    first, end = tl.load(table + row), tl.load(table + row + 1)
    offsets, slots, write, last_write = writes_of(table, num_rows, row)
    state = tl.load(places + tl.load(table + num_rows + 1 + row) * stride, mask=inside, other=0.0)
    key_head = head // (heads // key_heads)
    speed = tl.load(rate + head)
    if BY_ELEMENT:
        decays = head * key_dim + keys
        bias = tl.load(rate_bias + decays, mask=is_key, other=0.0)
    else:
        bias = tl.load(rate_bias + head)
    for token in range(first, end):
        inputs = mixed + token * mixed_stride
        query = tl.load(inputs + key_head * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(inputs + (key_heads + key_head) * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        value = inputs + 2 * key_heads * key_dim + head * value_dim + columns
        value = tl.load(value, mask=is_column, other=0.0).to(tl.float32)
        query, key = _unit(query, epsilon) * scale, _unit(key, epsilon)
        if BY_ELEMENT:
            rest = tl.load(decay + token * decay_stride + decays, mask=is_key, other=0.0).to(tl.float32) + bias
        else:
            rest = tl.load(decay + token * decay_stride + head).to(tl.float32) + bias
        factor = tl.exp(-speed * softplus(rest))
        if BY_ELEMENT:
            state *= factor[:, None]
        else:
            state *= factor
        strength = beta_scale * tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
        delta = strength * (value - tl.sum(state * key[:, None], axis=0))
        state += key[:, None] * delta[None, :]
        result = tl.sum(state * query[:, None], axis=0)
        tl.store(out + (token * heads + head) * value_dim + columns, result, mask=is_column)
        write = store_state(places, state, inside, stride, offsets, slots, write, last_write, token - first + 1)


@triton.jit
def _gated_norm_kernel(
    x,  # [T, H, V] float32
    gate,  # [T, H * V]
    scale,  # [V] float32
    y,  # [T, H, V]
    root_square,
    gate_stride,
    heads,
    value_dim,
    V: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, V)
    inside = columns < value_dim
    place = (token * heads + head) * value_dim + columns
    value = tl.load(x + place, mask=inside, other=0.0)
    factors = tl.load(scale + columns, mask=inside, other=0.0)
    opened = tl.load(gate + token * gate_stride + head * value_dim + columns, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) + root_square) * factors
    if not SIGMOID:
        normed *= opened
    tl.store(y + place, (normed * tl.sigmoid(opened)).to(y.dtype.element_ty), mask=inside)


def serves(plan: StatePlan, by_element: bool, states: Tensor) -> bool:
    """True when registers hold the states and the results of a head, and the kernels of chunks have its decays."""
    return (plan.longest <= MAX_TOKENS or not by_element) and states.shape[2] <= 256 and states.shape[3] <= 1024


def delta_net(inputs: Projected, weights: DeltaWeights, plan: StatePlan, states: Tensor) -> Tensor:
    """See `kernels.delta_net.delta_net`; `serves` must be True."""
    mixed, gate, beta, decay = (part if part.stride(1) == 1 else part.contiguous() for part in inputs)
    _, heads, key_dim, value_dim = states.shape
    results = torch.empty((len(mixed), heads, value_dim), dtype=torch.float32, device=mixed.device)
    if plan.longest <= MAX_TOKENS:
        _rule_kernel[(plan.num_rows, heads, triton.cdiv(value_dim, _COLUMNS))](
            *(mixed, beta, decay, weights.rate, weights.rate_bias, plan.table, states, results),
            *(key_dim**-0.5, EPS, weights.beta_scale, plan.num_rows, mixed.stride(0), beta.stride(0), decay.stride(0)),
            *(heads, weights.key_heads, key_dim, value_dim),
            D=triton.next_power_of_2(key_dim),
            COLUMNS=_COLUMNS,
            BY_ELEMENT=weights.by_element,
        )
    else:
        chunks.compute((mixed, beta, decay), weights, plan, states, results, EPS)
    out = torch.empty((len(mixed), heads * value_dim), dtype=mixed.dtype, device=mixed.device)
    _gated_norm_kernel[(len(mixed), heads)](
        *(results, gate, weights.norm.scale, out, weights.norm.root_value**2, gate.stride(0), heads, value_dim),
        V=triton.next_power_of_2(value_dim),
        SIGMOID=weights.sigmoid_gate,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels: Qwen3.5's and Kimi Linear's sizes, and small ones; each dtype."""
    cases = chunks.compile_cases()
    for dtype, size, is_kimi in (
        *(("bf16", 128, False), ("fp16", 64, False), ("fp32", 128, False), ("bf16", 256, False)),
        ("bf16", 128, True),
    ):
        name = f"{dtype} d{size}{' by element' if is_kimi else ''}"
        types = {
            **{"mixed beta decay": f"*{dtype}", "rate rate_bias states out": "*fp32", "table": "*i64"},
            "scale epsilon beta_scale": "fp32",
        }
        constants = {"D": size, "COLUMNS": _COLUMNS, "BY_ELEMENT": is_kimi}
        cases.append(make_case(f"delta_net {name}", _rule_kernel, constants, types))
        types = {"x scale": "*fp32", "gate y": f"*{dtype}", "root_square": "fp32"}
        cases.append(make_case(f"delta_net norm {name}", _gated_norm_kernel, {"V": size, "SIGMOID": is_kimi}, types))
    return cases
