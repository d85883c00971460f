"""Options for the embedded demo model, where the user sets none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ...models.demo import DEMO_MODEL_NAME, demo_adapters, demo_eagle3_path
from ..core.config import EngineArgs

DEMO_SPECULATIVE_TOKENS = 4


def is_demo(args: EngineArgs) -> bool:
    """True when these options serve the embedded demo model."""
    return args.model is None or args.model == DEMO_MODEL_NAME


def apply_demo_defaults(args: EngineArgs, explicit: Collection[str] = ()) -> tuple[EngineArgs, dict[str, Path]]:
    """Options and adapters (name -> folder) for the demo model; another model's options come back as they are.

    LoRA is enabled, with the demo's adapters, and so is adaptive speculation with the demo's EAGLE-3 head. What the
    user has set stays: every option that differs from its default, and those named in `explicit`, whatever their value.
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
    return args, demo_adapters() if args.enable_lora else {}
