"""The embedded demo model: a small decoder of Mistral's shape, its draft model and EAGLE-3 head, and four adapters with
draft weights for both; shipped with the package.

This module only knows where the files are; it imports nothing heavy. The repository's `tools/demo_model` makes them.
"""

from pathlib import Path

DEMO_MODEL_NAME = "outrider-demo"
"""The name of the demo model: what users may write as the model, and what its adapters name as their base."""

DEMO_ADAPTER_NAMES = ("json", "sql", "support", "tools")

_ROOT = Path(__file__).resolve().parent


def demo_model_path() -> Path:
    """Return the folder of the base model and its tokenizer."""
    return _ROOT / "base"


def demo_draft_path() -> Path:
    """Return the folder of the draft model, which shares the base model's vocabulary."""
    return _ROOT / "draft"


def demo_eagle3_path() -> Path:
    """Return the folder of the EAGLE-3 head, which shares the base model's embeddings and lm_head."""
    return _ROOT / "eagle3"


def demo_adapters() -> dict[str, Path]:
    """Return the folder of each demo adapter by its name."""
    return {name: _ROOT / "adapters" / name for name in DEMO_ADAPTER_NAMES}
