"""Files written so that a name never shows half a file: written aside, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_json(path: Path, value: Any) -> None:
    """Write JSON, indented."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    aside = path.with_name(path.name + ".new")
    save_file({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, aside, metadata={"format": "pt"})
    aside.chmod(0o644)
    os.replace(aside, path)


def write_torch(path: Path, value: Any) -> None:
    """Write what `torch.load(weights_only=True)` reads."""
    aside = path.with_name(path.name + ".new")
    torch.save(value, aside)
    os.replace(aside, path)


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json, and model.safetensors last: with it the model is whole."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    write_json(folder / "config.json", dict(config))
    write_tensors(folder / "model.safetensors", tensors)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a PEFT adapter in the same order."""
    (folder / "adapter_model.safetensors").unlink(missing_ok=True)
    write_json(folder / "adapter_config.json", dict(config))
    write_tensors(folder / "adapter_model.safetensors", tensors)
