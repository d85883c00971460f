"""Biases of an adapter: PEFT's `lora_bias` (a bias of lora_B) and `bias` (the model's own biases, trained).

Both are vectors [out] that the adapter adds to a module's output: `scale · lora_B.bias`, and the trained bias less the
base model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import adapter_error
from .peft_config import PeftConfig
from .tensor_file import FLOATS, TensorFile
from .tensor_keys import BIAS, LORA_BIAS, FileModule, ModelModules, ModuleShape


def check_biases(module: FileModule, config: PeftConfig) -> None:
    """Refuse (AdapterError) biases that adapter_config.json does not declare, and missing ones."""
    if config.lora_bias != (LORA_BIAS in module.keys) and set(module.keys) != {BIAS}:
        verb = "is missing: the configuration has" if config.lora_bias else "has no use without"
        raise adapter_error(f"{module.name}: {LORA_BIAS} {verb} lora_bias")
    # PEFT copies an embedding or head along with its adapter, or saves it trained; `vocabulary` reads its bias.
    if BIAS in module.keys and config.bias == "none" and module.shape.is_base is None:
        raise adapter_error(f"{module.name}: {module.keys[BIAS]} has no use: the configuration has bias='none'")


def read_biases(
    modules: Iterable[FileModule], file: TensorFile, config: PeftConfig, model: ModelModules
) -> tuple[dict[str, Tensor], bytes]:
    """Return the vectors that an adapter adds, float32 [out] by module of the model, and their digest.

    Raises:
        AdapterError: a bias of a module that takes none, such as an expert's; a trained bias of a module that has none;
            numbers that are not finite in the dtype of use.
    """
    known, dtype = model.shapes, model.layout.dtype
    biases: dict[str, Tensor] = {}
    digest = hashlib.sha256(b"biases")
    for module in modules:
        for part in (LORA_BIAS, BIAS):
            if part not in module.keys:
                continue
            if any(known[target].base is None for target in module.targets):
                raise adapter_error(f"{module.name}: a bias is not served on experts ({module.keys[part]})")
            values = file.read(module.keys[part])
            if values.dtype not in FLOATS:
                raise adapter_error(f"{module.name}: {module.keys[part]} has dtype {values.dtype}, which is not served")
            values = values.float()
            if part == LORA_BIAS:
                values = values * config.scale_of(module.configured)
            sizes = [known[target].out_features for target in module.targets]
            for target, added in zip(module.targets, values.split(sizes), strict=True):
                digest.update(f"{target}|{part}\n".encode())
                digest.update(added.contiguous().view(torch.uint8).numpy().data)
                if part == BIAS:
                    added = added - base_bias(module, known[target])
                biases[target] = biases[target] + added if target in biases else added
                if not bool(torch.isfinite(biases[target].to(dtype)).all()):
                    name = str(dtype).removeprefix("torch.")
                    raise adapter_error(f"{module.name}: {module.keys[part]} is not finite in {name}")
    return biases, digest.digest()


def base_bias(module: FileModule, shape: ModuleShape) -> Tensor:
    """Return the model's bias [out] float32 on the CPU; AdapterError if the module has none."""
    assert shape.base is not None
    bias = shape.base.bias()
    if bias is None:
        raise adapter_error(f"{module.name}: {module.keys[BIAS]}: this module has no bias in the served model")
    return bias.float().cpu()
