"""What can be chosen of each kernel, its limits, and the numbers of a shape that it is chosen by."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


def _of(least: int, most: int) -> Any:
    """A power of two from `least` to `most`."""
    return dataclasses.field(metadata={"least": least, "most": most, "power": True})


def _stages() -> Any:
    return dataclasses.field(metadata={"least": 1, "most": 8, "power": False})


def bucket(size: int) -> int:
    """The power of two that sizes up to it are tuned as: kernels pad to it, or loop over it."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """A kernel's config. `kernel` is its name in files, `shape` names the numbers it is found by."""

    kernel: ClassVar[str]
    shape: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class AttentionConfig(KernelConfig):
    """Of paged attention, for tiles of `block_m` queries times heads; `is_long`: of rows of several tiles."""

    kernel: ClassVar[str] = "attention"
    shape: ClassVar[tuple[str, ...]] = ("block_m", "head_dim", "itemsize", "is_long")

    block_n: int = _of(16, 256)
    """Keys at a time."""
    num_warps: int = _of(1, 16)
    num_stages: int = _stages()
    programs: int = _of(1, 64)
    """A multiprocessor: below that the keys of a tile are split."""


@dataclass(frozen=True, slots=True)
class KVWriteConfig(KernelConfig):
    """Of the kernel that rotates queries and keys and writes keys and values into the cache."""

    kernel: ClassVar[str] = "kv_write"
    shape: ClassVar[tuple[str, ...]] = ("head_dim", "itemsize")

    block_heads: int = _of(1, 64)
    """Heads a program."""
    num_warps: int = _of(1, 16)


@dataclass(frozen=True, slots=True)
class RopeConfig(KernelConfig):
    """Of the rotation alone."""

    kernel: ClassVar[str] = "rope"
    shape: ClassVar[tuple[str, ...]] = ("head_dim", "itemsize")

    block_heads: int = _of(1, 64)
    """Heads a program."""
    num_warps: int = _of(1, 16)


@dataclass(frozen=True, slots=True)
class RMSNormConfig(KernelConfig):
    """Of the norm."""

    kernel: ClassVar[str] = "rms_norm"
    shape: ClassVar[tuple[str, ...]] = ("width", "itemsize")

    rows: int = _of(1, 128)
    """A program."""
    num_warps: int = _of(1, 32)


@dataclass(frozen=True, slots=True)
class SiluMulConfig(KernelConfig):
    """Of the activation."""

    kernel: ClassVar[str] = "silu_mul"
    shape: ClassVar[tuple[str, ...]] = ("width", "itemsize")

    block: int = _of(64, 16384)
    """Outputs a program."""
    num_warps: int = _of(1, 32)


@dataclass(frozen=True, slots=True)
class LoRAShrinkConfig(KernelConfig):
    """Of x Aᵀ, for tiles of `tile` tokens of one adapter."""

    kernel: ClassVar[str] = "lora_shrink"
    shape: ClassVar[tuple[str, ...]] = ("tile", "inputs", "itemsize")

    block: int = _of(32, 2048)
    """Inputs at a time, of one token."""
    dot_block: int = _of(16, 512)
    """Inputs at a time, of several tokens."""
    num_warps: int = _of(1, 16)
    num_stages: int = _stages()
    units: int = _of(16, 16384)
    """Pieces of work wanted a launch: below that the inputs are split."""
    programs: int = _of(1, 64)
    """A multiprocessor, at most."""


@dataclass(frozen=True, slots=True)
class LoRAExpandConfig(KernelConfig):
    """Of the products with B, and of adapters' embeddings."""

    kernel: ClassVar[str] = "lora_expand"
    shape: ClassVar[tuple[str, ...]] = ("tile", "outputs", "itemsize")

    block: int = _of(16, 1024)
    """Outputs at a time."""
    num_warps: int = _of(1, 16)
    num_stages: int = _stages()
    programs: int = _of(1, 64)
    """A multiprocessor, at most."""


@dataclass(frozen=True, slots=True)
class FilterConfig(KernelConfig):
    """Of temperature, min-p, top-k and top-p."""

    kernel: ClassVar[str] = "sampling_filter"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    block: int = _of(64, 16384)
    """Lanes a row."""
    num_warps: int = _of(1, 32)
    depth: int = _of(1, 64)
    """Candidates a lane has room for."""


@dataclass(frozen=True, slots=True)
class StatsConfig(KernelConfig):
    """Of rows' maxima and sums of exponentials."""

    kernel: ClassVar[str] = "sampling_stats"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    block: int = _of(64, 16384)
    """Logits at a time."""
    num_warps: int = _of(1, 32)
    splits: int = _of(1, 64)
    """Programs a row, at most."""


@dataclass(frozen=True, slots=True)
class LogprobsConfig(KernelConfig):
    """Of log-probabilities, ranks and the most likely tokens."""

    kernel: ClassVar[str] = "sampling_logprobs"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    block: int = _of(64, 16384)
    """Lanes a row."""
    num_warps: int = _of(1, 32)
    depth: int = _of(1, 64)
    """Candidates a lane has room for."""


@dataclass(frozen=True, slots=True)
class NoiseArgmaxConfig(KernelConfig):
    """Of draws with Gumbel noise."""

    kernel: ClassVar[str] = "noise_argmax"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    block: int = _of(64, 16384)
    """Tokens at a time."""
    num_warps: int = _of(1, 32)
    programs: int = _of(16, 16384)
    """Wanted a launch: below that a row is split."""


@dataclass(frozen=True, slots=True)
class VerificationConfig(KernelConfig):
    """Of the verification of drafts."""

    kernel: ClassVar[str] = "verification"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    block: int = _of(64, 16384)
    """Tokens at a time."""
    num_warps: int = _of(1, 32)
    programs: int = _of(16, 16384)
    """Wanted a launch: below that a row is split."""


KINDS: dict[str, type[KernelConfig]] = {
    kind.kernel: kind
    for kind in (
        AttentionConfig,
        KVWriteConfig,
        RopeConfig,
        RMSNormConfig,
        SiluMulConfig,
        LoRAShrinkConfig,
        LoRAExpandConfig,
        FilterConfig,
        StatsConfig,
        LogprobsConfig,
        NoiseArgmaxConfig,
        VerificationConfig,
    )
}
"""By their names in files."""


def problem(field: dataclasses.Field[Any], value: object) -> str | None:
    """What is wrong with a config's value, if anything."""
    least, most = field.metadata["least"], field.metadata["most"]
    power = field.metadata["power"]
    if type(value) is int and least <= value <= most and not (power and value & (value - 1)):
        return None
    kind = "a power of two" if power else "an integer"
    return f"must be {kind} from {least} to {most}, got {value!r}"
