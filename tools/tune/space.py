"""Search spaces: the configs to try for each kernel, and their compilation without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...kernels.compile_case import CompileCase
from ...kernels.lora.device_rows import default_expand_config, default_shrink_config
from ...kernels.noise.triton import DEFAULT as NOISE
from ...kernels.paged_attention.schedule import DEFAULT_WRITE, MIN_SPLIT_KEYS, default_config
from ...kernels.rms_norm.triton import default_config as default_norm
from ...kernels.sampling.triton import DEFAULT as FILTER
from ...kernels.sampling.triton_logprobs import DEFAULT_LOGPROBS, DEFAULT_STATS
from ...kernels.silu_mul.triton import DEFAULT as SILU
from ...kernels.tuning.configs import (
    AttentionConfig,
    KernelConfig,
    LoRAExpandConfig,
    LoRAShrinkConfig,
    RMSNormConfig,
    SiluMulConfig,
)
from ...kernels.verification.triton import DEFAULT as VERIFICATION

Shape = tuple[int, ...]
Fields = Mapping[str, tuple[int, ...]]


class Space(NamedTuple):
    """Search space of a kernel: all combinations within a group of fields, with the best values so far of others."""

    default: Callable[[Shape, int], KernelConfig]
    """Default config of a shape on a compute capability times ten."""
    groups: tuple[Fields, ...]
    """Groups of fields. The fields that change the compiled kernel are in the first."""
    constants: Mapping[str, str]
    """Constants of the compiled kernel, by the config's field."""
    compiled: Mapping[str, Shape]
    """Compile cases that stand for the kernel, and their shapes."""
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


def compile_candidates(cases: Mapping[str, CompileCase], arch: int = 90) -> Iterator[tuple[str, CompileCase]]:
    """(kernel, case) of every compiled kernel that a search for `arch` may launch, the defaults included."""
    for kernel, space in SPACES.items():
        for name, shape in space.compiled.items():
            default = space.default(shape, arch)
            seen = set()
            for config in candidates(space, shape, default, space.groups[0]):
                case = _compiled(space, cases[name], config)
                if case.name not in seen:
                    seen.add(case.name)
                    yield kernel, case


def _compiled(space: Space, case: CompileCase, config: KernelConfig) -> CompileCase:
    fields = dataclasses.asdict(config)
    constants = case.constexprs | {constant: fields[field] for field, constant in space.constants.items()}
    if "MIN_CHUNKS" in constants:
        constants["MIN_CHUNKS"] = MIN_SPLIT_KEYS // constants["BLOCK_N"]
    stages = fields.get("num_stages", case.num_stages)
    changes = [f"{name.lower()}={constants[name]}" for name in space.constants.values()]
    changes += [f"warps={fields['num_warps']}", f"stages={stages}"]
    name = f"{case.name} [{' '.join(changes)}]"
    return case._replace(name=name, constexprs=constants, num_warps=fields["num_warps"], num_stages=stages)


def _a_thread(elements: int, num_warps: int) -> float:
    return elements / (32 * num_warps)


def _attention_fits(shape: Shape, config: AttentionConfig) -> bool:
    block_m, head_dim, itemsize, _ = shape
    sums = _a_thread(block_m * head_dim, config.num_warps) + _a_thread(block_m * config.block_n, config.num_warps)
    loaded = 2 * config.num_stages * config.block_n * head_dim * itemsize
    return sums <= 192 and loaded <= 192 << 10


def _norm_fits(shape: Shape, config: RMSNormConfig) -> bool:
    return 2 <= _a_thread(config.rows * shape[0], config.num_warps) <= 64


def _silu_fits(shape: Shape, config: SiluMulConfig) -> bool:
    return 4 <= _a_thread(config.block, config.num_warps) <= 32 and config.block <= max(shape[0], 256)


def _shrink_fits(shape: Shape, config: LoRAShrinkConfig) -> bool:
    tile, _, itemsize = shape
    splits_inputs = tile == 16 or config.units == default_shrink_config(tile).units
    loaded = config.num_stages * config.dot_block * (tile + 16) * itemsize
    # 16 rows of a tile for one token are in registers twice, because the loop is unrolled.
    return splits_inputs and loaded <= 160 << 10 and _a_thread(16 * config.block, config.num_warps) <= 64


def _expand_fits(shape: Shape, config: LoRAExpandConfig) -> bool:
    return _a_thread(shape[0] * config.block, config.num_warps) <= 96


def _block_fits(shape: Shape, config: Any) -> bool:
    return 4 <= _a_thread(config.block, config.num_warps) <= 16


_HEADS: Fields = {"block_heads": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4)}
_ROW_PROGRAMS: Fields = {"programs": (256, 512, 1024, 2048)}
_PROGRAMS: Fields = {"programs": (4, 8, 16)}
_TILES: Fields = {"block": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}
_LANES: Fields = {"block": (2048, 4096, 8192), "num_warps": (8, 16, 32), "depth": (4, 8, 16)}
_BLOCK = {"block": "BLOCK"}
_VOCAB = 131072
_SIZE = 2  # bytes of bfloat16, which the compile cases below are of

SPACES: dict[str, Space] = {
    "attention": Space(
        lambda shape, arch: default_config(shape[0], shape[1], shape[2], arch, bool(shape[3])),
        (
            {"block_n": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)},
            {"programs": (1, 2, 4, 8)},
        ),
        {"block_n": "BLOCK_N"},
        {
            "paged_attention bf16 d128 m16": (16, 128, _SIZE, 0),
            "paged_attention window bf16 d128 m32": (32, 128, _SIZE, 0),
            "paged_attention bf16 d128 m128": (128, 128, _SIZE, 1),
        },
        _attention_fits,
        tolerance=2e-2,
    ),
    "kv_write": Space(
        lambda shape, arch: DEFAULT_WRITE,
        (_HEADS,),
        {"block_heads": "BLOCK_HEADS"},
        {"paged_attention write bf16 d128": (128, _SIZE)},
        tolerance=2e-2,
    ),
    "rms_norm": Space(
        lambda shape, arch: default_norm(shape[0]),
        ({"rows": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16, 32)},),
        {"rows": "ROWS"},
        {"rms_norm bf16 w4096": (4096, _SIZE), "rms_norm bf16 w896": (1024, _SIZE)},
        _norm_fits,
        tolerance=2e-2,
    ),
    "silu_mul": Space(
        lambda shape, arch: SILU,
        ({"block": (256, 512, 1024, 2048, 4096), "num_warps": (1, 2, 4, 8)},),
        _BLOCK,
        {"silu_mul bf16 w14336": (16384, _SIZE)},
        _silu_fits,
        tolerance=2e-2,
    ),
    "lora_shrink": Space(
        lambda shape, arch: default_shrink_config(shape[0]),
        (
            {"block": (128, 256, 512), "dot_block": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
            {"units": (256, 512, 1024, 2048), **_PROGRAMS},
        ),
        _BLOCK | {"dot_block": "DOT_BLOCK"},
        {"lora shrink bf16 tile16 in4096": (16, 4096, _SIZE), "lora shrink bf16 tile64 in4096": (64, 4096, _SIZE)},
        _shrink_fits,
        tolerance=5e-2,
    ),
    "lora_expand": Space(
        lambda shape, arch: default_expand_config(shape[0]),
        ({"block": (64, 128, 256, 512), "num_warps": (2, 4, 8), "num_stages": (2, 3)}, _PROGRAMS),
        _BLOCK,
        {"lora expand bf16 tile16 a16": (16, 4096, _SIZE), "lora expand bf16 tile64 a16": (64, 4096, _SIZE)},
        _expand_fits,
        tolerance=5e-2,
    ),
    "sampling_filter": Space(
        lambda shape, arch: FILTER,
        (_LANES,),
        _BLOCK | {"depth": "DEPTH"},
        {"sampling filter": (_VOCAB,)},
        _block_fits,
    ),
    "sampling_stats": Space(
        lambda shape, arch: DEFAULT_STATS,
        (_TILES, {"splits": (8, 16, 32)}),
        _BLOCK,
        {"sampling stats": (_VOCAB,)},
        _block_fits,
        tolerance=1e-5,
    ),
    "sampling_logprobs": Space(
        lambda shape, arch: DEFAULT_LOGPROBS,
        (_LANES,),
        _BLOCK | {"depth": "DEPTH"},
        {"sampling logprobs": (_VOCAB,)},
        _block_fits,
        tolerance=1e-4,
    ),
    "noise_argmax": Space(
        lambda shape, arch: NOISE, (_TILES, _ROW_PROGRAMS), _BLOCK, {"noise argmax": (_VOCAB,)}, _block_fits
    ),
    "verification": Space(
        lambda shape, arch: VERIFICATION,
        (_TILES, _ROW_PROGRAMS),
        _BLOCK,
        {"verification of 31 drafts": (_VOCAB,)},
        _block_fits,
    ),
}
"""Search spaces by the kernels' names in files."""
