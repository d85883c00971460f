"""Comparison of adapters with the model that is about to be started, from config.json and headers alone.

The engine checks every shape once the model is loaded, which takes minutes for a large one. A user with an adapter of
another model on the command line is reported at once. This module imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....models.checkpoint.json_files import read_model_config
from ...core.adapter_files import CONFIG_FILE, WEIGHT_FILES, AdapterFolder
from ...core.errors import AdapterError, OutriderError

_MAX_BYTES = 16 << 20
"""Largest header that is read, as in `lora.files`."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_READS_HIDDEN = re.compile(
    r"\.layers\.\d+\.(?:self_attn|mlp)\.(?:[qkv]|qkv|gate|up|gate_up)_proj\.lora_A(?:\.\w+)?\.weight$"
)
"""Matrices A of projections that read hidden states in all models."""


def check_fits(folder: AdapterFolder, model: Path, max_rank: int) -> None:
    """Refuse (AdapterError) an adapter with layers that the model lacks, another hidden size or too high a rank. What
    cannot be read here passes: the engine says what is wrong with it."""
    try:
        raw = read_model_config(model)
        settings = json.loads(folder.read(CONFIG_FILE, 1 << 20) or b"{}")
        shapes = _shapes(folder)
    except (OutriderError, ValueError, RecursionError):
        return
    rank = settings.get("r") if isinstance(settings, dict) else None
    if isinstance(rank, int) and rank > max_rank and not settings.get("rank_pattern"):
        raise AdapterError(f"rank {rank} exceeds the limit max_lora_rank={max_rank}", param="lora_path")
    misfits = list(_misfits(raw, shapes))
    if misfits:
        more = f", and {len(misfits) - 1} more tensors do not fit" if len(misfits) > 1 else ""
        raise AdapterError(f"base mismatch: {misfits[0]}{more}", param="lora_path")


def _misfits(values: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[str]:
    layers = _count(values, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _count(values, "hidden_size", "n_embd")
    for key, entry in sorted(shapes.items()):
        shape = entry.get("shape") if isinstance(entry, dict) else None
        found = _LAYER.search(key)
        if "vision" in key or found is None or not isinstance(shape, list):
            continue
        if layers and int(found[1]) >= layers:
            yield f"{key[:200]} is of layer {found[1]}; the served model has {layers} layers"
        elif hidden and _READS_HIDDEN.search(key) and len(shape) == 2 and shape[1] != hidden:
            yield f"{key[:200]} is {shape}; the served model has the hidden size {hidden}"


def _count(values: Mapping[str, Any], *names: str) -> int:
    return next((values[name] for name in names if type(values.get(name)) is int), 0)


def _shapes(folder: AdapterFolder) -> dict[str, Any]:
    """Header of the safetensors file that would be read; empty if there is none."""
    for name in WEIGHT_FILES:
        file = folder.open(name)
        if file is None:
            continue
        with file:
            size = int.from_bytes(file.read(8) or b"", "little")
            header = json.loads(file.read(size)) if name.endswith(".safetensors") and size <= _MAX_BYTES else {}
            return header if isinstance(header, dict) else {}
    return {}
