"""Models of the comparison: random weights, right for speed, meaningless for text and acceptance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lora_models import make_model, make_tokenizer

from outrider.models.checkpoint.json_files import read_json
from outrider.models.config import config_from_hf
from outrider.platform.cli.bench.random_adapters import AdapterWriter

from .worker import NUM_ADAPTERS

RANKS = (8, 16)
"""Ranks of the adapters, in turn."""


def make_missing(folder: Path, names: Sequence[str], with_adapters: Sequence[str], say: Callable[[str], None]) -> None:
    """Make the missing ones of these models of `lora_models.py`, and `NAME-lora0` to 7 for those with adapters.

    Existing ones are used unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name / "config.json").is_file():
            say(f"making {folder / name}")
            with tempfile.TemporaryDirectory(dir=folder) as work:
                make_model(name, Path(work) / name, make_tokenizer())
                shutil.move(Path(work) / name, folder / name)
    for name in with_adapters:
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
