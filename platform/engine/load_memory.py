"""Out-of-memory errors at start: one line with the part that did not fit, and the option to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...kernels.out_of_memory import is_out_of_memory
from ..core.errors import InvalidRequestError

WEIGHTS = (
    "the model's weights",
    "a smaller model, --dtype bfloat16, --quantization int4 or --tensor-parallel-size takes less",
    "model",
)
DRAFTER = (
    "the drafter's weights and buffers",
    "take a smaller drafter, or none (speculative_config)",
    "speculative_config",
)
ADAPTERS = (
    "the adapters' rows",
    "lower max_loras or max_lora_rank, or set lora_memory",
    "max_lora_rank",
)
KV_CACHE = (
    "the KV cache",
    "lower gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override, or set kv_cache_dtype fp8",
    "gpu_memory_utilization",
)
SWAP_SPACE = ("the KV blocks of the host", "lower swap_space", "swap_space")
WARM_UP = (
    "the first steps",
    "lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization",
    "max_num_batched_tokens",
)


@contextmanager
def memory_for(part: tuple[str, str, str]) -> Iterator[None]:
    """Raise InvalidRequestError if this block runs out of memory. `part`: its name, advice, and the option that the
    error names."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        what, advice, param = part
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InvalidRequestError(f"no memory for {what}: {advice} ({reason})", param=param) from error
