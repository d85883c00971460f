"""Adapters for measurements: PEFT folders with random weights, cheap to make in any number and for any model."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ....models.config import DecoderConfig
from ....models.decoder import Decoder
from ...core.lora_request import LoRARequest

FILES_PER_RANK = 4
"""Number of different files of weights. The adapters of a rank share them by hard links and differ in their scale."""
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SCALES_PER_OCTAVE = 128
"""Number of scales from one power of two to the next. Thousands of scales stay small, and bfloat16 keeps them apart."""


@functools.cache
def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(in, out) features of all projections, by their names in a checkpoint."""
    linears = Decoder(config).linears()
    return {name: (linear.in_features, size) for linear in linears for name, size in linear.slices}


class AdapterWriter:
    """Writer of adapters on all projections of a model. No two compute the same, so no two share anything in an engine.

    Their files were written a moment before they are loaded, so they come from the operating system's cache.
    """

    def __init__(self, folder: Path, config: DecoderConfig, seed: int) -> None:
        """`folder` is empty. The same seed gives the same adapters."""
        self._folder = folder
        self._config = config
        self._seed = seed
        self._num_written = 0

    def write(self, name: str, rank: int) -> LoRARequest:
        """Write an adapter into a folder of its name."""
        number, self._num_written = self._num_written, self._num_written + 1
        folder = self._folder / name
        folder.mkdir()
        _link(self._weights(rank, number % FILES_PER_RANK), folder / _WEIGHTS)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank * 2.0 ** (number // FILES_PER_RANK / _SCALES_PER_OCTAVE),
            "target_modules": sorted({name.rpartition(".")[2] for name in linear_shapes(self._config)}),
            "bias": "none",
            "inference_mode": True,
            "task_type": "CAUSAL_LM",
        }
        (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return LoRARequest(name, path=str(folder))

    def _weights(self, rank: int, number: int) -> Path:
        file = self._folder / f"rank-{rank}-{number}.safetensors"
        if not file.exists():
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + rank * FILES_PER_RANK + number)
            save_file(dict(self._tensors(rank, generator)), file, metadata={"format": "pt"})
        return file

    def _tensors(self, rank: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        for module, (in_features, out_features) in linear_shapes(self._config).items():
            for part, shape, size in (
                ("A", (rank, in_features), in_features**-0.5),
                ("B", (out_features, rank), 0.01),
            ):
                values = torch.randn(shape, generator=generator) * size
                yield f"base_model.model.{module}.lora_{part}.weight", values.to(self._config.dtype)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
