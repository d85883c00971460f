"""Adapters in other tools' formats: those of mlx-lm are read as PEFT's, others refused by name.

mlx-lm writes adapter_config.json with `lora_parameters`, and adapters.safetensors:

    model.layers.3.self_attn.q_proj.lora_a    [in, r]     PEFT: lora_A.weight [r, in]
                                    lora_b    [r, out]          lora_B.weight [out, r]
                                    m         [out]             lora_magnitude_vector

The delta is scale · x lora_a lora_b, with a scale that is not divided by the rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...platform.core.adapter_files import AdapterFolder
from ...platform.core.errors import AdapterError

if TYPE_CHECKING:
    from .tensor_file import TensorFile

_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_TOOLS = (
    ("adapter_*.pt", "torchtune's own format; its Hugging Face checkpointer writes PEFT's files"),
    ("*.nemo", "NeMo's own format; llm.export_ckpt with target='hf-peft' writes PEFT's files"),
    ("weights/*.distcp", "a distributed checkpoint; NeMo's llm.export_ckpt with target='hf-peft' writes PEFT's files"),
    ("*.gguf", "llama.cpp's format; serve the PEFT folder that it was converted from"),
    ("pytorch_lora_weights.safetensors", "an adapter of an image model"),
)
_MAX_ENTRIES = 1000
"""Entries of a folder that are looked at."""


def tool_hint(folder: AdapterFolder) -> str:
    """Return the likely content of a folder without PEFT's files, as the end of a message; "" if unknown."""
    with contextlib.suppress(OSError, ValueError):  # a path that is too long, or has a NUL
        names = _some_names(folder.path)
        if "weights" in names and not os.path.islink(os.path.join(folder.path, "weights")):
            names += [f"weights/{name}" for name in _some_names(os.path.join(folder.path, "weights"))]
        for pattern, hint in _TOOLS:
            if any(fnmatch(name, pattern) for name in names):
                return f"; it holds {hint}"
    return ""


def _some_names(folder: str) -> list[str]:
    with contextlib.suppress(NotADirectoryError), os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _MAX_ENTRIES)]
    return []


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Return whether adapter_config.json is mlx-lm's."""
    return "peft_type" not in config and isinstance(config.get("lora_parameters"), dict)


def peft_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's fields of mlx-lm's configuration.

    Raises:
        AdapterError: it is of a fully trained model, or has no numbers for rank and scale.
    """
    kind, lora = config.get("fine_tune_type", "lora"), config["lora_parameters"]
    if kind not in ("lora", "dora"):
        raise AdapterError(f"fine_tune_type={str(kind)[:40]!r} of mlx-lm is no adapter", param="lora_path")
    rank, scale = lora.get("rank"), lora.get("scale")
    if type(rank) is not int or type(scale) not in (int, float):
        raise AdapterError("lora_parameters of mlx-lm must have the numbers rank and scale", param="lora_path")
    return {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "use_dora": kind == "dora"}


def peft_tensors(file: TensorFile) -> TensorFile:
    """View the tensors of an mlx-lm file under PEFT's names; others keep theirs."""
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, str] = {}
    for key, shape in file.shapes.items():
        module, _, part = key.rpartition(".")
        name = f"{module}.{_PARTS[part]}" if part in _PARTS else key
        if len(shape) > 2 and part in _PARTS:
            raise AdapterError(f"{key[:200]}: mlx-lm's adapters on experts are not served", param="lora_path")
        if name in sources:
            raise AdapterError(f"two tensors for the same weight: {key[:200]}", param="lora_path")
        shapes[name], sources[name] = shape[::-1], key
    if any("embed_tokens" in name for name in shapes):
        raise AdapterError("mlx-lm's adapters on embed_tokens are not served", param="lora_path")

    def read(name: str) -> Tensor:
        tensor = file.read(sources[name])
        return tensor.t().contiguous() if tensor.dim() == 2 else tensor

    return file._replace(shapes=shapes, read=read, header=None, fill=None)
