"""Number of rank rows on the device."""

from __future__ import annotations

from ...platform.core.config import LoRAConfig
from ...platform.core.errors import InvalidRequestError
from ...platform.core.sizes import shown_bytes


def count_rows(config: LoRAConfig, bytes_per_row: int) -> int:
    """Return the number of rank rows: what `lora_memory` has room for, else `max_loras` adapters of the largest rank.

    `bytes_per_row` is without the vocabulary's rows. These are far wider, and take memory only where they are used.

    Raises:
        InvalidRequestError: that is less than one adapter of the largest rank.
    """
    if config.memory_bytes is None:
        return config.max_loras * config.max_lora_rank
    num_rows = config.memory_bytes // max(1, bytes_per_row)
    if num_rows < config.max_lora_rank:
        least = config.max_lora_rank * bytes_per_row
        raise InvalidRequestError(
            f"lora_memory of {shown_bytes(config.memory_bytes)} has room for {num_rows} rank rows; one adapter of rank "
            f"{config.max_lora_rank} (max_lora_rank) takes {shown_bytes(least)}",
            param="lora_memory",
        )
    return num_rows
