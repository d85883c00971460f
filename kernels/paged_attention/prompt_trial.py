"""Choice between the kernels and torch for whole prompts on a GPU, by trials of a model's heads at the start, at
several lengths."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from ..rope import Rotation
from .device_step import DeviceStep
from .native import RowArrays
from .schedule import Planner
from .torch import LayerKV
from .whole_prompts import can_serve

logger = logging.getLogger(__name__)

SecondsOf = Callable[[Callable[[], object]], float]
"""Seconds that a function takes."""

LENGTHS = (2048, 512, 128)
"""Tokens of the trials' prompts. At the first one attention is a tenth of an 8B model's time; the last one is about the
shortest that tensor cores fill a tile with."""
MARGIN = 0.95
"""Largest ratio of torch's time to the kernels' for which torch is used: times vary by some percent, and the same
machine should choose the same at each start."""
_BLOCK_SIZE = 16
_ROUNDS, _RUNS = 5, 10


def min_fused_tokens(planner: Planner, dtype: torch.dtype, device: torch.device) -> int | None:
    """See `Planner.min_fused_tokens` of this model; the trials take some tens of milliseconds."""
    if device.type != "cuda" or planner.invariant or not can_serve(planner.options, dtype):
        return None
    if not _can_fuse(planner, dtype, device):
        return None
    return shortest_win(planner, dtype, device, _seconds_on_gpu)


def shortest_win(
    planner: Planner, dtype: torch.dtype, device: torch.device, seconds_of: SecondsOf, lengths: Sequence[int] = LENGTHS
) -> int | None:
    """The last of the falling `lengths` up to which torch wins each trial; None: it loses the first one."""
    won = itertools.takewhile(lambda tokens: wins(planner, dtype, device, seconds_of, tokens), lengths)
    return min(won, default=None)


@torch.inference_mode()
def wins(planner: Planner, dtype: torch.dtype, device: torch.device, seconds_of: SecondsOf, tokens: int) -> bool:
    """True when torch attends to a prompt of `tokens` tokens in less time than the kernels, rotation and the write of
    keys included."""
    num_heads, num_kv_heads, dim = planner.shape
    num_blocks = -(-tokens // _BLOCK_SIZE)
    zero = np.zeros(1, dtype=np.int64)
    rows = RowArrays(np.arange(tokens), np.array([tokens]), zero, zero, zero, np.arange(num_blocks))
    cache = torch.zeros(2, num_kv_heads, num_blocks, _BLOCK_SIZE, dim, dtype=dtype, device=device)
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype, device=device)
    angles = torch.zeros(2, tokens, 1, planner.options.rotary_dim or dim, dtype=dtype, device=device)
    rotation, kv = Rotation(*angles), LayerKV(*cache)

    def seconds(fuses: bool) -> float:
        fused = replace(planner, min_fused_tokens=1 if fuses else None)
        step = DeviceStep(fused, dtype, _BLOCK_SIZE, rows, device)
        return seconds_of(lambda: step.attend_qkv(qkv, rotation, None, kv, None))

    ours, theirs = seconds(False), seconds(True)
    logger.info("attention of %d tokens: %.0f us by the kernels, %.0f by torch", tokens, ours * 1e6, theirs * 1e6)
    return theirs <= MARGIN * ours


def _can_fuse(planner: Planner, dtype: torch.dtype, device: torch.device) -> bool:
    """True when torch would not hold all scores of such a prompt in memory."""
    num_heads, num_kv_heads, dim = planner.shape
    q = torch.empty(1, num_heads, LENGTHS[0], dim, dtype=dtype, device=device)
    k = torch.empty(1, num_kv_heads, LENGTHS[0], dim, dtype=dtype, device=device)
    return can_use_flash_attention(SDPAParams(q, k, k, None, 0.0, True, num_heads != num_kv_heads))


def _seconds_on_gpu(work: Callable[[], object]) -> float:
    """Shortest mean of a few rounds, in seconds a run; the first run compiles."""
    times = []
    work()
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_RUNS):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (1000.0 * _RUNS))
    return min(times)
