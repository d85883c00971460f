"""Models of the comparison: random weights, right for speed, meaningless for text and acceptance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lora_models import COMMON, SHAPES, TOKENS, make_model, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.checkpoint.json_files import read_json
from outrider.models.config import config_from_hf
from outrider.platform.cli.bench.random_adapters import AdapterWriter

from .worker import NUM_ADAPTERS

DRAFT = "draft"
DRAFTED = "small"
"""Model that shares its vocabulary with `draft`."""
RANKS = (8, 16)
"""Ranks of the adapters, in turn."""


def make_missing(folder: Path, names: Sequence[str], with_draft: bool, say: Callable[[str], None]) -> None:
    """Make missing models: those of `lora_models.py`, `NAME-lora0` to 7 for each, and `draft` (3M parameters).

    Existing ones are used unchanged.
    """
    tokenizer = None
    for name in (*names, *([DRAFT] if with_draft else [])):
        if not (folder / name / "config.json").is_file():
            say(f"making {folder / name}")
            tokenizer = tokenizer or make_tokenizer()
            with tempfile.TemporaryDirectory(dir=_made(folder)) as work:
                if name in SHAPES:
                    make_model(name, Path(work) / name, tokenizer)
                else:
                    torch.manual_seed(0)
                    LlamaForCausalLM(_draft_config()).to(torch.bfloat16).save_pretrained(Path(work) / name)
                    tokenizer.save_pretrained(Path(work) / name)
                shutil.move(Path(work) / name, folder / name)
    for name in names:
        _make_adapters(folder, name, say)


def _make_adapters(folder: Path, name: str, say: Callable[[str], None]) -> None:
    """Write adapters as PEFT folders on all projections, with ranks 8 and 16 in turn."""
    for i in range(NUM_ADAPTERS):
        adapter = folder / f"{name}-lora{i}"
        if not (adapter / "adapter_config.json").is_file():
            say(f"making {adapter}")
            with tempfile.TemporaryDirectory(dir=folder) as work:
                config = config_from_hf(read_json(folder / name / "config.json"), torch.bfloat16)
                writer = AdapterWriter(Path(work), config, seed=i)
                writer.write(adapter.name, RANKS[i % len(RANKS)])
                shutil.move(Path(work) / adapter.name, adapter)


def _draft_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=TOKENS,
        max_position_embeddings=2048,
        **COMMON,
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
