"""Search spaces: the configs to try for each kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...kernels.act_and_mul.triton import DEFAULT as SILU
from ...kernels.lora.triton import EXPAND_CONFIGS, SHRINK_CONFIGS
from ...kernels.noise.triton import DEFAULT as NOISE
from ...kernels.paged_attention.schedule import DEFAULT_WRITE, default_config
from ...kernels.quantized_linear.triton import default_config as default_quantized
from ...kernels.rms_norm.triton import default_config as default_norm
from ...kernels.sampling.triton import DEFAULT as FILTER
from ...kernels.sampling.triton_logprobs import DEFAULT_LOGPROBS, DEFAULT_STATS
from ...kernels.tuning.configs import (
    ActAndMulConfig,
    AttentionConfig,
    KernelConfig,
    LoRAExpandConfig,
    LoRAShrinkConfig,
    QuantizedLinearConfig,
    RMSNormConfig,
)
from ...kernels.verification.triton import DEFAULT as VERIFICATION

Shape = tuple[int, ...]
Fields = Mapping[str, tuple[int, ...]]


class Space(NamedTuple):
    """Search space of a kernel: all combinations within a group of fields, with the best values so far of others."""

    default: Callable[[Shape, int], KernelConfig]
    """Default config of a shape on a compute capability times ten."""
    groups: tuple[Fields, ...]
    """Groups of fields, searched in this order."""
    fits: Callable[[Shape, Any], bool] = lambda shape, config: True
    """True when a config is worth a trial: its data fit into registers and shared memory."""
    tolerance: float = 0.0
    """Relative and absolute tolerance of the results: the default adds in another order."""


def candidates(space: Space, shape: Shape, base: KernelConfig, group: Fields) -> Iterator[KernelConfig]:
    """`base`, then the other combinations of a group's values that fit."""
    yield base
    for values in itertools.product(*group.values()):
        config = dataclasses.replace(base, **dict(zip(group, values, strict=True)))
        if config != base and space.fits(shape, config):
            yield config


def _a_thread(elements: int, num_warps: int) -> float:
    return elements / (32 * num_warps)


def _attention_fits(shape: Shape, config: AttentionConfig) -> bool:
    block_m, head_dim, itemsize, _ = shape
    sums = _a_thread(block_m * head_dim, config.num_warps) + _a_thread(block_m * config.block_n, config.num_warps)
    loaded = 2 * config.num_stages * config.block_n * head_dim * itemsize
    return sums <= 192 and loaded <= 192 << 10


def _norm_fits(shape: Shape, config: RMSNormConfig) -> bool:
    return 2 <= _a_thread(config.rows * shape[0], config.num_warps) <= 64


def _silu_fits(shape: Shape, config: ActAndMulConfig) -> bool:
    return 4 <= _a_thread(config.block, config.num_warps) <= 32 and config.block <= max(shape[0], 256)


def _quantized_fits(shape: Shape, config: QuantizedLinearConfig) -> bool:
    tile, _, _, bits, itemsize = shape
    sums = _a_thread(tile * config.block_o, config.num_warps)
    numbers = _a_thread(config.block_o * config.block_k * itemsize // 2, config.num_warps)
    loaded = config.num_stages * config.block_k * (config.block_o + (8 // bits) * tile * itemsize)
    return 2 * sums + numbers <= 192 and loaded <= 192 << 10


def _shrink_fits(shape: Shape, config: LoRAShrinkConfig) -> bool:
    tile, _, itemsize = shape
    loaded = config.num_stages * config.dot_block * (tile + 16) * itemsize
    # 16 rows of a tile for one token are in registers twice, because the loop is unrolled.
    return loaded <= 160 << 10 and _a_thread(16 * config.block, config.num_warps) <= 64


def _expand_fits(shape: Shape, config: LoRAExpandConfig) -> bool:
    sums = _a_thread(shape[0] * config.dot_block, config.num_warps)
    # 16 rows of a block for one token are in registers, two numbers in each.
    return config.dot_block <= config.block and max(sums, _a_thread(8 * config.block, config.num_warps)) <= 96


def _block_fits(shape: Shape, config: Any) -> bool:
    return 4 <= _a_thread(config.block, config.num_warps) <= 16


_HEADS: Fields = {"block_heads": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4)}
_ROW_PROGRAMS: Fields = {"programs": (256, 512, 1024, 2048)}
_PROGRAMS: Fields = {"programs": (4, 8, 16, 32)}
_TILES: Fields = {"block": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}
_LANES: Fields = {"block": (2048, 4096, 8192), "num_warps": (8, 16, 32), "depth": (4, 8, 16)}

SPACES: dict[str, Space] = {
    "attention": Space(
        lambda shape, arch: default_config(shape[0], shape[1], shape[2], arch, bool(shape[3])),
        (
            {"block_n": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)},
            {"programs": (1, 2, 4, 8)},
        ),
        _attention_fits,
        tolerance=2e-2,
    ),
    "kv_write": Space(lambda shape, arch: DEFAULT_WRITE, (_HEADS,), tolerance=2e-2),
    "rms_norm": Space(
        lambda shape, arch: default_norm(shape[0]),
        ({"rows": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16, 32)},),
        _norm_fits,
        tolerance=2e-2,
    ),
    "act_and_mul": Space(
        lambda shape, arch: SILU,
        ({"block": (256, 512, 1024, 2048, 4096), "num_warps": (1, 2, 4, 8)},),
        _silu_fits,
        tolerance=2e-2,
    ),
    "quantized_linear": Space(
        lambda shape, arch: default_quantized(shape[0], *shape[3:]),
        (
            {"block_o": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8)},
            {"block_k": (32, 64, 128), "num_stages": (2, 3, 4, 5)},
            {"programs": (132, 264, 528, 1056, 2112)},
        ),
        _quantized_fits,
        tolerance=2e-2,
    ),
    "lora_shrink": Space(
        lambda shape, arch: SHRINK_CONFIGS[shape[0]],
        (
            {"block": (128, 256, 512), "dot_block": (64, 128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
            {"units": (128, 256, 512, 1024, 2048), **_PROGRAMS},
        ),
        _shrink_fits,
        tolerance=5e-2,
    ),
    "lora_expand": Space(
        lambda shape, arch: EXPAND_CONFIGS[shape[0]],
        (
            {"block": (256, 512, 1024), "dot_block": (64, 128, 256), "num_warps": (1, 2, 4, 8)},
            {"num_stages": (2, 3), **_PROGRAMS},
        ),
        _expand_fits,
        tolerance=5e-2,
    ),
    "sampling_filter": Space(lambda shape, arch: FILTER, (_LANES,), _block_fits),
    "sampling_stats": Space(
        lambda shape, arch: DEFAULT_STATS, (_TILES, {"splits": (8, 16, 32)}), _block_fits, tolerance=1e-5
    ),
    "sampling_logprobs": Space(lambda shape, arch: DEFAULT_LOGPROBS, (_LANES,), _block_fits, tolerance=1e-4),
    "noise_argmax": Space(lambda shape, arch: NOISE, (_TILES, _ROW_PROGRAMS), _block_fits),
    "verification": Space(lambda shape, arch: VERIFICATION, (_TILES, _ROW_PROGRAMS), _block_fits),
}
"""Search spaces by the kernels' names in files."""
