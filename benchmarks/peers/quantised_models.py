"""Checkpoints of compressed-tensors for the comparison, which vLLM and Outrider read as they are."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.quantization.rounding import round_int8

GROUP = 128
"""Inputs that share a scale at 4 bits."""


def _bytes(weight: Tensor) -> dict[str, Tensor]:
    """int8 codes with one scale for each output."""
    rounded = round_int8(weight)
    return {"weight": rounded.codes, "weight_scale": rounded.scales.to(torch.bfloat16)}


def _nibbles(weight: Tensor) -> dict[str, Tensor]:
    """Codes -8 to 7, eight to an int32 along the inputs, with one scale for each group."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7.5).to(torch.bfloat16)
    codes = (groups / scales.float().clamp_(min=1e-12)[:, :, None]).round_().clamp_(-8, 7).flatten(1).to(
        torch.int64
    ) + 8
    words = sum(codes[:, place::8] << (4 * place) for place in range(8))
    assert isinstance(words, Tensor)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


_WEIGHTS: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False}
FORMS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    "w8a8": (
        "int-quantized",
        {
            "weights": _WEIGHTS | {"num_bits": 8, "strategy": "channel"},
            "input_activations": _WEIGHTS | {"num_bits": 8, "strategy": "token", "dynamic": True},
        },
        _bytes,
    ),
    "w4a16": (
        "pack-quantized",
        {"weights": _WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": GROUP}, "input_activations": None},
        _nibbles,
    ),
}
"""Mode -> format, scheme of the projections, and their tensors. Embedding and head stay as they are."""


def make_quantised(folder: Path, name: str, mode: str, say: Callable[[str], None]) -> None:
    """Make `folder/name-mode` from the model `folder/name` if it is missing."""
    source, target = folder / name, folder / f"{name}-{mode}"
    if (target / "config.json").is_file():
        return
    say(f"making {target}")
    form, scheme, tensors_of = FORMS[mode]
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / target.name
        shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        tensors: dict[str, Tensor] = {}
        for file in sorted(source.glob("*.safetensors")):
            for key, tensor in load_file(file).items():
                module = key.removesuffix(".weight")
                if module.endswith("_proj"):
                    parts = tensors_of(tensor)
                    tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
                else:
                    tensors[key] = tensor
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
            "ignore": ["lm_head"],
        }
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        made.rename(target)
