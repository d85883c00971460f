"""Options for the embedded demo model that the user does not set."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ...models.demo import DEMO_MODEL_NAME, demo_adapters, demo_eagle3_path
from ..core.config import EngineArgs

DEMO_SPECULATIVE_TOKENS = 4
DEMO_KV_MEMORY_BYTES = 512 << 20
"""Memory of the KV cache: some 170,000 tokens of the demo and its head, which is ten full contexts. Without a bound it
would have room for all sequences at their longest, 3 GB."""


def is_demo(args: EngineArgs) -> bool:
    """True when these options serve the embedded demo model."""
    return args.model is None or args.model == DEMO_MODEL_NAME


def apply_demo_defaults(args: EngineArgs, explicit: Collection[str] = ()) -> tuple[EngineArgs, dict[str, Path]]:
    """Options and adapters (name -> folder) for the demo model; another model's options come back as they are.

    LoRA is enabled, with the demo's adapters, and so is adaptive speculation with the demo's EAGLE-3 head. The KV cache
    has `DEMO_KV_MEMORY_BYTES`. What the user has set stays: every option that differs from its default, and those named
    in `explicit`, whatever their value.
    """
    if not is_demo(args):
        return args, {}
    args = replace(args, model=None)
    if "enable_lora" not in explicit:
        args = replace(args, enable_lora=True)
    if args.speculative_config is None and "speculative_config" not in explicit:
        config = {
            "method": "eagle3",
            "model": str(demo_eagle3_path()),
            "num_speculative_tokens": DEMO_SPECULATIVE_TOKENS,
            "adaptive": True,
        }
        args = replace(args, speculative_config=config)
    if args.kv_cache_memory_bytes is None and args.num_gpu_blocks_override is None:
        args = replace(args, kv_cache_memory_bytes=DEMO_KV_MEMORY_BYTES)
    return args, demo_adapters() if args.enable_lora else {}
