"""Launches of the adapters' Triton kernels (`triton.py`) for one projection, over a step's groups (`groups.py`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ..tuning import bucket, tuned
from .groups import BLOCK_ROWS, RowGroups
from .triton import (
    EXPAND_CONFIGS,
    GAIN_BLOCK,
    GAIN_WARPS,
    MAX_SPLITS,
    SHRINK_CONFIGS,
    expand_kernel,
    gain_kernel,
    shrink_kernel,
)

_MIN_CHUNK = 256
"""Fewest inputs in a part of a shrink's sums."""


@functools.cache
def _num_programs(device: torch.device, per_processor: int) -> int:
    """Most programs of a launch. The interpreter gets few, so that there too a program takes several units."""
    if device.type != "cuda":
        return 3
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count


def _output_blocks(slice_sizes: Sequence[int], block: int, device: torch.device) -> Tensor:
    """Table of output blocks [num_blocks, 4] int32: slice, first output, output after the slice's last, 0."""
    table = []
    first = 0
    for index, size in enumerate(slice_sizes):
        table += [(index, n, first + size, 0) for n in range(first, first + size, block)]
        first += size
    return torch.tensor(table, dtype=torch.int32, device=device)


def split_inputs(
    num_tokens: int, num_slices: int, in_features: int, wanted_units: int, unit: int = _MIN_CHUNK
) -> tuple[int, int]:
    """(parts of a shrink's sums, inputs of a part): parts enough for `wanted_units` units of work, none too short,
    fixed by the step's size. A part is a multiple of `unit` inputs, and none is empty: a loop that Triton unrolls runs
    when it should not if it starts behind its end."""
    wanted = triton.next_power_of_2(-(-wanted_units // max(1, num_tokens * num_slices)))
    splits = max(1, min(wanted, MAX_SPLITS, in_features // _MIN_CHUNK))
    chunk = triton.cdiv(triton.cdiv(in_features, splits), unit) * unit
    return triton.cdiv(in_features, chunk), chunk


class TritonRows:
    """Rank rows of one projection or of the token embeddings, as the kernels read them; views of the pool's tensors."""

    def __init__(self, a: Tensor, b: Tensor, slice_sizes: Sequence[int], live: Tensor) -> None:
        """Store the rows, and choose the launch configs.

        Args:
            a: [R, S, in], contiguous but for its first stride, which is that of `b`.
            b: [R, sum(slice_sizes)], the slices side by side, the scale folded in.
            slice_sizes: Outputs of each of the S slices.
            live: [R, S] uint8 on the same device: 0 where a row has no weights in a slice; these are not read.

        Raises:
            ValueError: shapes, strides, dtypes or devices that do not go together.
        """
        num_rows, num_slices, in_features = a.shape
        if b.shape != (num_rows, sum(slice_sizes)) or len(slice_sizes) != num_slices or live.shape != a.shape[:2]:
            raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, slices {slice_sizes}, live {tuple(live.shape)}")
        if a.stride(0) != b.stride(0) or a.stride()[1:] != (in_features, 1) or b.stride(1) != 1 or live.stride(1) != 1:
            raise ValueError("the rows of a and b must be contiguous and equally far apart")
        if a.dtype != b.dtype or live.dtype != torch.uint8 or len({a.device, b.device, live.device}) > 1:
            raise ValueError(f"a {a.dtype} and b {b.dtype} must be alike, live uint8, and all on one device")
        self._a, self._b, self._live = a, b, live
        self._in_features, self._out_features, self._num_slices = in_features, b.shape[1], num_slices
        self._alignment = 16 if all(size % 16 == 0 for size in slice_sizes) else 1
        size = a.element_size()
        self._shrink_configs = {
            tile: tuned(a.device, config, tile, bucket(in_features), size) for tile, config in SHRINK_CONFIGS.items()
        }
        self._expand_configs = {
            tile: tuned(a.device, config, tile, bucket(self._out_features), size)
            for tile, config in EXPAND_CONFIGS.items()
        }
        self._output_blocks = {
            tile: _output_blocks(slice_sizes, config.block, a.device) for tile, config in self._expand_configs.items()
        }

    def add(self, y: Tensor, x: Tensor, groups: RowGroups) -> None:
        """y[:, s] += (x a[rows, s]ᵀ) b[rows, s] for the tokens of each group and each slice s; y is mutated.

        Products of several tokens round the values between shrink and expand to the rows' dtype, as two separate
        matrix products would.

        Args:
            y: [T, out], rows contiguous; mutated.
            x: [T, in].
            groups: Groups of these T tokens.

        Raises:
            ValueError: shapes or dtypes that do not go together.
        """
        self._check(y, len(x), groups)
        if x.dtype != y.dtype or x.shape[1] != self._in_features:
            raise ValueError(f"x {tuple(x.shape)} {x.dtype} must be [T, {self._in_features}] of {y.dtype}")
        if not groups.max_tiles:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        config = self._shrink_configs[groups.tile]
        unit = max(config.block, config.dot_block)
        units = config.units if groups.tile == 16 else 1  # the expand of larger tiles adds up no parts
        splits, chunk = split_inputs(groups.num_tokens, self._num_slices, self._in_features, units, unit)
        h = torch.empty(self._num_slices * splits, groups.h_size, dtype=torch.float32, device=x.device)
        units = groups.max_items * self._num_slices * splits
        shrink_kernel[(min(units, _num_programs(x.device, config.programs)),)](
            *(x, self._a, self._live, groups.data, h),
            *(x.stride(0), self._a.stride(0), self._live.stride(0), groups.h_size, splits, chunk),
            FEATURES=self._in_features,
            SLICES=self._num_slices,
            TILE=groups.tile,
            ROWS=BLOCK_ROWS,
            BLOCK=config.block,
            DOT_BLOCK=config.dot_block,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        self._expand(y, groups, h, None, splits)

    def add_embeddings(self, y: Tensor, ids: Tensor, groups: RowGroups) -> None:
        """y[t] += a[rows, 0, ids[t]] b[rows] for the tokens of each group: one slice, ids [T]; y [T, out] is mutated.

        Raises:
            ValueError: shapes or dtypes that do not go together.
        """
        self._check(y, len(ids), groups)
        if self._num_slices != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self._num_slices} slices and ids of {ids.dtype}: one slice and integers are embedded")
        if groups.max_tiles:
            self._expand(y, groups, self._a, ids.contiguous(), 1)

    def _check(self, y: Tensor, num_tokens: int, groups: RowGroups) -> None:
        if y.dtype != self._a.dtype or y.stride(1) != 1:
            raise ValueError(f"y must have contiguous rows of {self._a.dtype}, not {y.dtype} with strides {y.stride()}")
        if num_tokens < groups.stop or y.shape != (num_tokens, self._out_features):
            raise ValueError(f"y {tuple(y.shape)} does not fit {num_tokens} tokens or the step's {groups.stop}")

    def _expand(self, y: Tensor, groups: RowGroups, h: Tensor, ids: Tensor | None, splits: int) -> None:
        output_blocks = self._output_blocks[groups.tile]
        num_blocks = len(output_blocks)
        config = self._expand_configs[groups.tile]
        expand_kernel[(min(groups.max_tiles * num_blocks, _num_programs(y.device, config.programs)),)](
            *(y, self._b, self._live, groups.data, h, groups.data if ids is None else ids, output_blocks),
            *(y.stride(0), self._b.stride(0), self._live.stride(0), groups.h_size, splits, num_blocks),
            ALIGNMENT=self._alignment,
            TILE=groups.tile,
            ROWS=BLOCK_ROWS,
            BLOCK=config.block,
            DOT_BLOCK=min(config.block, config.dot_block),
            SPLITS=MAX_SPLITS if groups.tile == 16 and ids is None else 1,
            EMBEDDING=ids is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def apply_gains(y: Tensor, excess: Tensor, slots: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """`y[t] += excess[slots[t]] * (y[t] - bias - residual[t])`, in float32, for the tokens with a slot.

    Args:
        y: [T, out]; mutated.
        excess: [slots, out], gains less one.
        slots: [T] int32 or int64; negative: the token stays as it is.
        bias: [out].
        residual: [T, out].
    """
    out = y.shape[1]
    assert all(tensor is None or tensor.stride(1) == 1 for tensor in (y, excess, residual))
    gain_kernel[(len(y) * triton.cdiv(out, GAIN_BLOCK),)](
        *(y, excess, slots, y if bias is None else bias, y if residual is None else residual),
        *(y.stride(0), excess.stride(0), 0 if residual is None else residual.stride(0)),
        OUT=out,
        BLOCK=GAIN_BLOCK,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=GAIN_WARPS,
    )
