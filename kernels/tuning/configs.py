"""Fields of each kernel's launch config, their limits, and the numbers of a shape by which a config is found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


def _power_of_two(least: int, most: int) -> Any:
    """Field that holds a power of two from `least` to `most`."""
    return dataclasses.field(metadata={"least": least, "most": most, "power": True})


def _any(least: int, most: int) -> Any:
    """Field that holds any number from `least` to `most`."""
    return dataclasses.field(metadata={"least": least, "most": most, "power": False})


def _stages() -> Any:
    return _any(1, 8)


def bucket(size: int) -> int:
    """Power of two at which a size is tuned: kernels pad to it, or loop over it."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Launch config of a kernel. `kernel` is its name in files; `shape` names the numbers by which it is found."""

    kernel: ClassVar[str]
    shape: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class AttentionConfig(KernelConfig):
    """Config of paged attention for tiles of `block_m` queries times heads; `is_long`: tiles of rows with several
    tiles."""

    kernel: ClassVar[str] = "attention"
    shape: ClassVar[tuple[str, ...]] = ("block_m", "head_dim", "itemsize", "is_long")

    block_n: int = _power_of_two(16, 256)
    """Keys in a chunk."""
    num_warps: int = _power_of_two(1, 16)
    num_stages: int = _stages()
    programs: int = _power_of_two(1, 64)
    """Programs for each multiprocessor below which the keys of a tile are split."""


@dataclass(frozen=True, slots=True)
class KVWriteConfig(KernelConfig):
    """Config of the kernel that rotates queries and keys and writes keys and values into the cache."""

    kernel: ClassVar[str] = "kv_write"
    shape: ClassVar[tuple[str, ...]] = ("head_dim", "itemsize")

    block_heads: int = _power_of_two(1, 64)
    """Heads of a program."""
    num_warps: int = _power_of_two(1, 16)


@dataclass(frozen=True, slots=True)
class RMSNormConfig(KernelConfig):
    """Config of the norm."""

    kernel: ClassVar[str] = "rms_norm"
    shape: ClassVar[tuple[str, ...]] = ("width", "itemsize")

    rows: int = _power_of_two(1, 128)
    """Rows of a program."""
    num_warps: int = _power_of_two(1, 32)


@dataclass(frozen=True, slots=True)
class BlockConfig(KernelConfig):
    """Config of a kernel that goes over rows in blocks."""

    block: int = _power_of_two(64, 16384)
    """Elements of a block."""
    num_warps: int = _power_of_two(1, 32)


@dataclass(frozen=True, slots=True)
class ActAndMulConfig(BlockConfig):
    """Config of SwiGLU's activation."""

    kernel: ClassVar[str] = "act_and_mul"
    shape: ClassVar[tuple[str, ...]] = ("width", "itemsize")


@dataclass(frozen=True, slots=True)
class QuantizedLinearConfig(KernelConfig):
    """Config of products with quantised weights, for tiles of `tile` tokens."""

    kernel: ClassVar[str] = "quantized_linear"
    shape: ClassVar[tuple[str, ...]] = ("tile", "inputs", "outputs", "bits", "itemsize")

    block_o: int = _power_of_two(16, 256)
    """Outputs of a program."""
    block_k: int = _power_of_two(32, 128)
    """Bytes of codes in a block; fewer if a group has fewer inputs."""
    num_warps: int = _power_of_two(1, 16)
    num_stages: int = _stages()
    programs: int = _any(1, 4096)
    """Programs that a device runs at a time: the inputs are split so that a launch fills it a whole number of times."""


@dataclass(frozen=True, slots=True)
class LoRAShrinkConfig(KernelConfig):
    """Config of x Aᵀ, for tiles of `tile` tokens of one adapter."""

    kernel: ClassVar[str] = "lora_shrink"
    shape: ClassVar[tuple[str, ...]] = ("tile", "inputs", "itemsize")

    block: int = _power_of_two(32, 2048)
    """Inputs of a block, for one token."""
    dot_block: int = _power_of_two(16, 512)
    """Inputs of a block, for several tokens."""
    num_warps: int = _power_of_two(1, 16)
    num_stages: int = _stages()
    units: int = _power_of_two(1, 16384)
    """Units of work in a launch below which the inputs are split."""
    programs: int = _power_of_two(1, 64)
    """Most programs for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class LoRAExpandConfig(KernelConfig):
    """Config of the products with B, and of adapters' embeddings."""

    kernel: ClassVar[str] = "lora_expand"
    shape: ClassVar[tuple[str, ...]] = ("tile", "outputs", "itemsize")

    block: int = _power_of_two(16, 4096)
    """Outputs of a block, for one token."""
    dot_block: int = _power_of_two(16, 512)
    """Outputs of a block at a time, for several tokens; at most `block`."""
    num_warps: int = _power_of_two(1, 16)
    num_stages: int = _stages()
    programs: int = _power_of_two(1, 64)
    """Most programs for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class FilterConfig(BlockConfig):
    """Config of temperature, min-p, top-k and top-p; a block is the lanes of a row."""

    kernel: ClassVar[str] = "sampling_filter"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    depth: int = _power_of_two(1, 64)
    """Candidates for which a lane has room."""


@dataclass(frozen=True, slots=True)
class StatsConfig(BlockConfig):
    """Config of rows' maxima and sums of exponentials."""

    kernel: ClassVar[str] = "sampling_stats"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    splits: int = _power_of_two(1, 64)
    """Most programs for a row."""


@dataclass(frozen=True, slots=True)
class LogprobsConfig(FilterConfig):
    """Config of log-probabilities, ranks and the most likely tokens, whose lanes are the filter's."""

    kernel: ClassVar[str] = "sampling_logprobs"


@dataclass(frozen=True, slots=True)
class NoiseArgmaxConfig(BlockConfig):
    """Config of draws with Gumbel noise."""

    kernel: ClassVar[str] = "noise_argmax"
    shape: ClassVar[tuple[str, ...]] = ("vocab",)

    programs: int = _power_of_two(16, 16384)
    """Programs in a launch below which a row is split."""


@dataclass(frozen=True, slots=True)
class VerificationConfig(NoiseArgmaxConfig):
    """Config of the verification of drafts, whose programs are the draws'."""

    kernel: ClassVar[str] = "verification"


KINDS: dict[str, type[KernelConfig]] = {
    kind.kernel: kind
    for kind in (
        AttentionConfig,
        KVWriteConfig,
        RMSNormConfig,
        ActAndMulConfig,
        QuantizedLinearConfig,
        LoRAShrinkConfig,
        LoRAExpandConfig,
        FilterConfig,
        StatsConfig,
        LogprobsConfig,
        NoiseArgmaxConfig,
        VerificationConfig,
    )
}
"""Kinds of configs by their names in files."""


def problem(field: dataclasses.Field[Any], value: object) -> str | None:
    """Error in a config's value; None when there is none."""
    least, most = field.metadata["least"], field.metadata["most"]
    power = field.metadata["power"]
    if type(value) is int and least <= value <= most and not (power and value & (value - 1)):
        return None
    kind = "a power of two" if power else "an integer"
    return f"must be {kind} from {least} to {most}, got {value!r}"
