"""Files written atomically: under another name, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Path to write to, renamed to `path` at the end."""
    written = path.with_name(path.name + ".new")
    yield written
    os.replace(written, path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, indented."""
    with aside(path) as file:
        file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Write {prefix}config.json, and {prefix}model.safetensors in bfloat16 last: with it the model is whole."""
    import torch
    from safetensors.torch import save_file

    weights = folder / f"{prefix}model.safetensors"
    weights.unlink(missing_ok=True)
    write_json(folder / f"{prefix}config.json", config)
    stored = {key: t.detach().to(torch.bfloat16 if t.is_floating_point() else t.dtype) for key, t in tensors.items()}
    with aside(weights) as file:
        save_file({key: t.cpu().contiguous().clone() for key, t in stored.items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)
