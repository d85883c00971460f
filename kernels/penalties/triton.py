"""Penalties in one launch: a program takes a row of logits and goes through its sequence's tokens, some at a time.

Tokens that were known when the step was prepared come as entries with counts. Tokens generated since (drafts, and the
token that the last step sampled) may be on the device alone: each program counts them, whether they equal an entry or
are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..device_outcome import device_tokens, host_ids
from ..staging import upload
from .torch import COUNT_BITS

if TYPE_CHECKING:
    from . import Penalised

_PAIRS = 4096
"""Pairs of (entry or new token, new token) that are compared at once: as many as registers hold."""
_MOST, _FEWEST = 256, 8
"""Most and fewest entries that are compared at once."""
_FEWEST_LATE = 8
"""Fewest new tokens that a compiled kernel is made for: fewer would need one more kernel, compiled while a request
waits."""
_COUNT_BITS = tl.constexpr(COUNT_BITS)
_NO_TOKEN = -1


@triton.jit
def _penalise(row, tokens, counts, mask, repetition, presence, frequency):
    """Penalise `tokens`, all different, which were generated `counts` times; row is mutated."""
    x = tl.load(row + tokens, mask=mask, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = x - tl.where(counts > 0, presence + frequency * counts.to(tl.float32), 0.0)
    tl.store(row + tokens, x, mask=mask)


@triton.jit
def penalty_kernel(
    logits, row_stride, places, owners, num_after, first, entries, strengths, after, after_stride,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Penalise row `places[i]` of the logits (mutated) for sequence s = owners[i], whose entries are [first[s], first[s
    + 1]).

    strengths [S, 3] float64; after [S, after_stride >= AFTER], whose first num_after[i] tokens count for the row.
    """
    index = tl.program_id(0)
    sequence = tl.load(owners + index)
    row = logits + tl.load(places + index) * row_stride
    repetition = tl.load(strengths + 3 * sequence).to(tl.float32)
    presence = tl.load(strengths + 3 * sequence + 1).to(tl.float32)
    frequency = tl.load(strengths + 3 * sequence + 2).to(tl.float32)
    lane = tl.arange(0, AFTER)
    valid = tl.load(num_after + index)
    late = tl.load(after + sequence * after_stride + lane, mask=lane < valid, other=-1)
    found = tl.zeros([AFTER], tl.int32)
    begin, end = tl.load(first + sequence).to(tl.int32), tl.load(first + sequence + 1).to(tl.int32)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        entry = tl.load(entries + place, mask=place < end, other=-1)
        token = entry >> _COUNT_BITS  # -1 after the last: equal to no token
        same = ((token[:, None] == late[None, :]) & (late >= 0)[None, :]).to(tl.int32)
        count = (entry & 0x7FFFFFFF).to(tl.int32) + tl.sum(same, 1)
        found = tl.maximum(found, tl.max(same, 0))
        _penalise(row, token, count, place < end, repetition, presence, frequency)
    total, earlier = tl.zeros([AFTER], tl.int32), tl.zeros([AFTER], tl.int32)
    for start in range(0, AFTER, PIECE):
        other_lane = start + tl.arange(0, PIECE)
        other = tl.load(after + sequence * after_stride + other_lane, mask=other_lane < valid, other=-1)
        equal = (late[:, None] == other[None, :]).to(tl.int32)
        total += tl.sum(equal, 1)
        earlier += tl.sum(tl.where(other_lane[None, :] < lane[:, None], equal, 0), 1)
    is_new = (late >= 0) & (found == 0) & (earlier == 0)
    _penalise(row, late, total, is_new, repetition, presence, frequency)


def penalise(logits: Tensor, sequences: Sequence[Penalised]) -> None:
    """`penalties.penalise` on a GPU."""
    num_rows = [len(sequence.places) for sequence in sequences]
    owners = np.repeat(np.arange(len(sequences)), num_rows)
    places = np.fromiter(chain.from_iterable(s.places for s in sequences), np.int64, len(owners))
    num_after = np.fromiter(chain.from_iterable(s.num_after for s in sequences), np.int64, len(owners))
    first = np.cumsum([0, *(len(sequence.entries) for sequence in sequences)])
    entries = np.concatenate([sequence.entries for sequence in sequences])
    strengths = np.array([(s.repetition, s.presence, s.frequency) for s in sequences], dtype=np.float64)
    width = triton.next_power_of_2(max(_FEWEST_LATE, *(sum(map(len, sequence.after)) for sequence in sequences)))
    tokens = np.full((len(sequences), width), _NO_TOKEN, dtype=np.int64)
    parts: list[tuple[int, Sequence[int]]] = []
    for number, sequence in enumerate(sequences):
        column = 0
        for part in sequence.after:
            tokens[number, column : column + len(part)] = host_ids(part)
            parts.append((number * width + column, part))
            column += len(part)
    arrays = upload(logits.device, places, owners, num_after, first, entries, strengths.reshape(-1), tokens.reshape(-1))
    after = arrays.pop()
    for group in device_tokens(parts):
        group.fill(after)
    # p + f · n is rounded twice, as on a CPU.
    penalty_kernel[(len(owners),)](
        logits, logits.stride(0), *arrays, after, width, **_constants(width), enable_fp_fusion=False
    )  # fmt: skip


def _constants(width: int) -> dict[str, int]:
    at_once = max(_FEWEST, min(_MOST, _PAIRS // width))
    return {"BLOCK": at_once, "PIECE": min(at_once, width), "AFTER": width}


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel."""
    types = {"logits": "*fp32", "strengths": "*fp64", "row_stride": "i64"}
    types |= {"places owners num_after first entries after": "*i64"}
    return [
        make_case(f"penalties after {after}", penalty_kernel, _constants(after), types)
        for after in (_FEWEST_LATE, 32, 128, 512)
    ]
