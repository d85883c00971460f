"""Sizes of the KV cache: blocks on the device and on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidRequestError, invalid
from .sizes import format_bytes

if TYPE_CHECKING:
    from .config import EngineArgs, Hardware, ModelFacts

_ACTIVATION_RESERVE = 1 << 30
_GRAPH_RESERVE = 512 << 20
"""Memory reserved for captured graphs: 8 MiB for each of up to 60. An estimate, not measured yet."""
_MOST_WITHOUT_KV = 1 << 16
"""Most blocks of a model without attention, whose blocks only name the prefixes of its states."""
_MOST_OF_HOST = 0.7
"""Share of the host's memory that `swap_space` may take."""


def cache_memory(args: EngineArgs, hardware: Hardware) -> int:
    """Bytes for KV and recurrent states: `kv_cache_memory_bytes`, or a part of what is left when weights and adapters
    are in place. On a GPU: the free memory without the share that is not ours and a reserve for activations and
    captured graphs. On a CPU: a quarter, 4 GiB at most."""
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if hardware.device == "cpu":
        return min(hardware.free_memory_bytes // 4, 4 << 30)
    not_ours = int(hardware.total_memory_bytes * (1.0 - args.gpu_memory_utilization))
    reserve = _ACTIVATION_RESERVE + (0 if args.enforce_eager else _GRAPH_RESERVE)
    return max(0, hardware.free_memory_bytes - not_ours - reserve)


def num_device_blocks(args: EngineArgs, facts: ModelFacts, memory: int, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks that `memory` allows, but no more than `max_num_seqs` full sequences (and a spare one) can use."""
    blocks_per_seq = -(-max_model_len // args.block_size)
    if args.num_gpu_blocks_override is not None:
        if args.num_gpu_blocks_override < blocks_per_seq:
            raise invalid(
                "num_gpu_blocks_override",
                f"{args.num_gpu_blocks_override} is less than the {blocks_per_seq} blocks that one sequence of "
                f"max_model_len {max_model_len} needs",
            )
        return args.num_gpu_blocks_override
    if not facts.kv_bytes_per_token:
        return max(blocks_per_seq, min(_MOST_WITHOUT_KV, blocks_per_seq * (max_num_seqs + 1)))
    fits = memory // (facts.kv_bytes_per_token * args.block_size)
    if fits < blocks_per_seq:
        raise InvalidRequestError(
            f"the KV cache has room for {fits * args.block_size} tokens, less than max_model_len {max_model_len}; "
            "lower max_model_len or raise kv_cache_memory_bytes",
            param="max_model_len",
        )
    return min(fits, blocks_per_seq * (max_num_seqs + 1))


def num_host_blocks(args: EngineArgs, facts: ModelFacts, hardware: Hardware) -> int:
    """Blocks that `swap_space` holds; 0 if nothing is swapped, as by a model without attention.

    Raises:
        InvalidRequestError: it holds none, or is most of the host's memory.
    """
    size = int(args.swap_space * (1 << 30))
    if size == 0 or args.preemption_mode == "recompute" or not facts.kv_bytes_per_token:
        return 0
    block_bytes = facts.kv_bytes_per_token * args.block_size
    if size < block_bytes:
        raise invalid("swap_space", f"has {format_bytes(size)}, less than a KV block's {format_bytes(block_bytes)}")
    most = int(_MOST_OF_HOST * hardware.host_memory_bytes)
    taken = size if hardware.device == "cpu" else 1 << (size - 1).bit_length()  # as PyTorch pins memory
    if 0 < most < taken:
        raise invalid(
            "swap_space",
            f"{args.swap_space:g} GiB takes {format_bytes(taken)}, more than {_MOST_OF_HOST:.0%} of the host's memory, "
            f"which are {format_bytes(most)}",
        )
    return size // block_bytes
