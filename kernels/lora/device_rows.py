"""Launches of the adapters' Triton kernels (`triton.py`) for one projection, over a step's groups (`groups.py`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..rms_norm import NormWeight
from ..side_stream import Join, prepare, run_alongside
from ..tuning import bucket, tuned
from ..tuning.configs import LoRAExpandConfig, LoRAShrinkConfig
from .groups import BLOCK_ROWS, RowGroups
from .triton import (
    EXPAND_CONFIGS,
    EXPAND_SPLITS,
    GAIN_BLOCK,
    GAIN_WARPS,
    INVARIANT_SPLITS,
    INVARIANT_UNITS,
    MAX_SPLITS,
    MIN_SPLIT_INPUTS,
    SHRINK_CONFIGS,
    expand_kernel,
    fit_registers,
    gain_kernel,
    shrink_kernel,
    with_norm,
)


@functools.cache
def _num_programs(device: torch.device, per_processor: int) -> int:
    """Most programs of a launch. The interpreter gets few, so that its programs take several units too."""
    if device.type != "cuda":
        return 3
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count


def _output_blocks(slice_sizes: Sequence[int], block: int) -> list[tuple[int, int, int, int]]:
    """Blocks of outputs: slice, first output, output after the block's last, 0."""
    table = []
    first = 0
    for index, size in enumerate(slice_sizes):
        table += [(index, n, min(n + block, first + size), 0) for n in range(first, first + size, block)]
        first += size
    return table


class _Blocks(NamedTuple):
    """Blocks of outputs of both sizes, [num_large + num_small, 4] int32."""

    table: Tensor
    num_large: int
    num_small: int


class _Splits(NamedTuple):
    """Parameters of a shrink's splits, in addition to the number of items, which the device knows."""

    units: int
    most: int
    block: int


class Shrunk(NamedTuple):
    """Values between shrink and expand, which another stream may still compute."""

    x: Tensor
    """The inputs, which must not be freed before the join."""
    h: Tensor
    splits: _Splits
    join: Join


class Expansion(NamedTuple):
    """Arguments of a product that expands in its own launch (`linear/triton_few.py`), in order."""

    b: Tensor
    live: Tensor
    groups: Tensor
    h: Tensor
    row_stride: int
    live_stride: int
    h_stride: int
    units: int
    max_splits: int
    split_block: int


class TritonRows:
    """Rank rows of one projection or of the token embeddings, as the kernels read them; views of the pool's tensors."""

    def __init__(self, a: Tensor, b: Tensor, slice_sizes: Sequence[int], live: Tensor) -> None:
        """Store the rows, and choose the launch configs.

        Args:
            a: [R, S, in], contiguous but for its first stride, which is that of `b`.
            b: [R, sum(slice_sizes)], the slices side by side, the scale folded in.
            slice_sizes: Outputs of each of the S slices.
            live: [R, S] uint8 on the same device: 0 if a row has no weights in a slice; these are not read.

        Raises:
            ValueError: shapes, strides, dtypes or devices that do not match.
        """
        num_rows, num_slices, in_features = a.shape
        if b.shape != (num_rows, sum(slice_sizes)) or len(slice_sizes) != num_slices or live.shape != a.shape[:2]:
            raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, slices {slice_sizes}, live {tuple(live.shape)}")
        if a.stride(0) != b.stride(0) or a.stride()[1:] != (in_features, 1) or b.stride(1) != 1 or live.stride(1) != 1:
            raise ValueError("the rows of a and b must be contiguous and equally far apart")
        if a.dtype != b.dtype or live.dtype != torch.uint8 or len({a.device, b.device, live.device}) > 1:
            raise ValueError(f"a {a.dtype} and b {b.dtype} must be alike, live uint8, and all on one device")
        prepare(a.device)
        self._a, self._b, self._live = a, b, live
        self._in_features, self._out_features, self._num_slices = in_features, b.shape[1], num_slices
        self._alignment = 16 if all(size % 16 == 0 for size in slice_sizes) else 1
        size = a.element_size()
        self._shrink_configs = {
            tile: tuned(a.device, config, tile, bucket(in_features), size) for tile, config in SHRINK_CONFIGS.items()
        }
        self._expand_configs = {
            tile: fit_registers(
                tuned(a.device, config, tile, bucket(self._out_features), size), self._alignment, size, embeds=False
            )
            for tile, config in EXPAND_CONFIGS.items()
        }
        self._output_blocks = {}
        for tile, config in self._expand_configs.items():
            small_block = _dot_block(config) if tile == 16 else config.block  # larger steps have tiles enough
            large, small = (_output_blocks(slice_sizes, size) for size in (config.block, small_block))
            table = torch.tensor(large + small, dtype=torch.int32, device=a.device)
            self._output_blocks[tile] = _Blocks(table, len(large), len(small))

    def expansion(self, x: Tensor, groups: RowGroups, norm: NormWeight | None) -> Expansion | None:
        """Shrink x [T, in] in one launch, and return the arguments of a product that does the rest; None when no token
        has an adapter. With a `norm` the product must normalise x too.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        x = self._checked(x, groups)
        if not groups.max_tiles:
            return None
        config = self._shrink_configs[groups.tile]
        config = config if norm is None else with_norm(config)
        splits, h = self._allocate(x, groups, config)
        self._shrink(x, h, groups, splits, config, norm)
        strides = self._b.stride(0), self._live.stride(0)
        return Expansion(self._b, self._live, groups.data, h, *strides, groups.h_size, *splits)

    def shrink(self, x: Tensor, groups: RowGroups) -> Shrunk | None:
        """Start x a[rows, s]ᵀ for the tokens of each group and each slice s, concurrently with launches until `add`
        joins it; None when no token has an adapter.

        Args:
            x: [T, in].
            groups: Groups of these T tokens.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        x = self._checked(x, groups)
        if not groups.max_tiles:
            return None
        config = self._shrink_configs[groups.tile]
        splits, h = self._allocate(x, groups, config)
        join = run_alongside(lambda: self._shrink(x, h, groups, splits, config), x.device)
        return Shrunk(x, h, splits, join)

    def _checked(self, x: Tensor, groups: RowGroups) -> Tensor:
        """Return x [T, in] with contiguous rows."""
        if x.dtype != self._a.dtype or x.shape[1] != self._in_features or len(x) < groups.stop:
            raise ValueError(
                f"x {tuple(x.shape)} {x.dtype} must be [T, {self._in_features}] of {self._a.dtype}, T >= {groups.stop}"
            )
        return x if x.stride(1) == 1 else x.contiguous()

    def _allocate(self, x: Tensor, groups: RowGroups, config: LoRAShrinkConfig) -> tuple[_Splits, Tensor]:
        """Splits of a shrink, and memory for its results."""
        splits = self._splits(config, groups)
        return splits, torch.empty(self._num_slices * splits.most, groups.h_size, dtype=torch.float32, device=x.device)

    def add(self, y: Tensor, x: Tensor, groups: RowGroups, shrunk: Shrunk | None = None) -> None:
        """y[:, s] += (x a[rows, s]ᵀ) b[rows, s] for the tokens of each group and each slice s; y is mutated.

        Products of several tokens round the values between shrink and expand to the rows' dtype, as two separate
        matrix products would.

        Args:
            y: [T, out], rows contiguous; mutated.
            x: [T, in].
            groups: Groups of these T tokens.
            shrunk: Result of `shrink` for the same x and groups, if it was called.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        self._check(y, len(x), groups)
        shrunk = shrunk or self.shrink(x, groups)
        if shrunk is not None:
            shrunk.join()
            self._expand(y, groups, shrunk.h, None, shrunk.splits)

    def _shrink(
        self,
        x: Tensor,
        h: Tensor,
        groups: RowGroups,
        splits: _Splits,
        config: LoRAShrinkConfig,
        norm: NormWeight | None = None,
    ) -> None:
        units = groups.max_items * self._num_slices * splits.most
        shrink_kernel[(min(units, _num_programs(x.device, config.programs)),)](
            *(x, self._a, self._live, groups.data, h, *((h, 1.0) if norm is None else (norm.scale, norm.unit))),
            *(x.stride(0), self._a.stride(0), self._live.stride(0), groups.h_size, splits.units, splits.most),
            FEATURES=self._in_features,
            SLICES=self._num_slices,
            TILE=groups.tile,
            ROWS=BLOCK_ROWS,
            BLOCK=config.block,
            DOT_BLOCK=config.dot_block,
            SINGLE=int(not groups.invariant),
            HAS_NORM=norm is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _splits(self, config: LoRAShrinkConfig, groups: RowGroups) -> _Splits:
        """Bounds of the parts of a shrink's sums. Captured launches serve steps with fewer items."""
        most = max(1, min(MAX_SPLITS, self._in_features // MIN_SPLIT_INPUTS))
        if groups.invariant:
            return _Splits(INVARIANT_UNITS, min(most, INVARIANT_SPLITS), max(config.block, config.dot_block))
        if not groups.replayable:
            most = min(most, triton.cdiv(config.units, groups.max_items * self._num_slices))
        return _Splits(config.units, most, max(config.block, config.dot_block))

    def add_embeddings(self, y: Tensor, ids: Tensor, groups: RowGroups) -> None:
        """y[t] += a[rows, 0, ids[t]] b[rows] for the tokens of each group: one slice, ids [T]; y [T, out] is mutated.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        self._check(y, len(ids), groups)
        if self._num_slices != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self._num_slices} slices and ids of {ids.dtype}: one slice and integers are embedded")
        if groups.max_tiles:
            self._expand(y, groups, self._a, ids.contiguous(), _Splits(1, 1, 1))

    def _check(self, y: Tensor, num_tokens: int, groups: RowGroups) -> None:
        if y.dtype != self._a.dtype or y.stride(1) != 1:
            raise ValueError(f"y must have contiguous rows of {self._a.dtype}, not {y.dtype} with strides {y.stride()}")
        if num_tokens < groups.stop or y.shape != (num_tokens, self._out_features):
            raise ValueError(f"y {tuple(y.shape)} does not fit {num_tokens} tokens or the step's {groups.stop}")

    def _expand(self, y: Tensor, groups: RowGroups, h: Tensor, ids: Tensor | None, splits: _Splits) -> None:
        blocks = self._output_blocks[groups.tile]
        config = self._expand_configs[groups.tile]
        config = fit_registers(config, self._alignment, self._b.element_size(), embeds=ids is not None)
        units = groups.max_tiles * blocks.num_small
        expand_kernel[(min(units, _num_programs(y.device, config.programs)),)](
            *(y, self._b, self._live, groups.data, h, groups.data if ids is None else ids, blocks.table),
            *(y.stride(0), self._b.stride(0), self._live.stride(0), groups.h_size, blocks.num_large, blocks.num_small),
            *(self._in_features, self._num_slices, *splits),
            ALIGNMENT=self._alignment,
            TILE=groups.tile,
            ROWS=BLOCK_ROWS,
            BLOCK=config.block,
            DOT_BLOCK=_dot_block(config),
            SPLITS=EXPAND_SPLITS[groups.tile],
            ONE_SPLITS=EXPAND_SPLITS[1],
            EMBEDDING=ids is not None,
            SINGLE=int(not groups.invariant),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _dot_block(config: LoRAExpandConfig) -> int:
    """Outputs of a block at a time, for several tokens."""
    return min(config.block, config.dot_block)


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
