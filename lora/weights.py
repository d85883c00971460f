"""The tensors of a PEFT folder: keys and shapes checked against a model's modules, then read, scaled and digested.

The tensors' keys and shapes say what is adapted; adapter_config.json says how it is scaled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .dora import gains
from .pacing import give_way
from .peft_config import PeftConfig, adapter_error, read_config, shown
from .tensor_file import WEIGHT_FILES, open_tensors
from .tensor_keys import BASE, DRAFTER, MAGNITUDE, A, B, FileModule, ModuleShape, Owner, group_keys

__all__ = [
    "BASE",
    "DRAFTER",
    "WEIGHT_FILES",
    "FolderWeights",
    "LoraWeights",
    "ModuleShape",
    "Owner",
    "read_weights",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LoraWeights(NamedTuple):
    """One module's weights, in the dtype served."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[r, out]: PEFT's lora_B transposed, the scale folded in, and the gain where there is one."""
    gain: Tensor | None = None
    """[out] float32: what the base weights' rows are multiplied with (DoRA); None: nothing."""


class FolderWeights(NamedTuple):
    """A folder's content."""

    modules: dict[str, LoraWeights]
    digest: bytes
    """SHA-256 of every adapted module's name, scale and tensors."""

    @property
    def rank(self) -> int:
        """The largest of the modules."""
        return max(len(part.a) for part in self.modules.values())


def read_weights(
    folder: Path, known: Mapping[str, ModuleShape], max_rank: int, dtype: torch.dtype, owner: Owner = BASE
) -> FolderWeights:
    """Read adapter_config.json and adapter_model.safetensors (or .bin) of `folder`, for a model with `known` modules,
    called `owner` in messages.

    Raises:
        AdapterError: files missing or broken, something that is not served, a rank above `max_rank`, a module that the
            model does not have or that has another shape there, weights that are not finite in `dtype`.
    """
    try:
        config = read_config(folder)
    except OSError as error:  # no permission, or a path that got too long
        raise adapter_error(f"cannot read {shown(folder)}: {error.strerror}") from error
    modules: dict[str, LoraWeights] = {}
    digest = hashlib.sha256()
    with open_tensors(folder) as file:
        found, copies = group_keys(file.shapes, known, owner)
        for module in found.values():
            _check_module(module, config, file.shapes, max_rank, owner)
        _check_saved(config, copies.values())
        for key, name in copies.items():
            _check_copy(key, file.read(key), name, known[name])
        for _, module in sorted(found.items()):
            scale = config.scale_of(module.configured)
            tensors = {part: file.read(key) for part, key in module.keys.items()}
            for part, tensor in sorted(tensors.items()):
                if tensor.dtype not in _FLOATS:
                    raise adapter_error(f"{module.name}: {part} has dtype {tensor.dtype}, which is not served")
                digest.update(f"{module.name}|{part}|{scale!r}|{tensor.dtype}|{list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
            modules.update(_served(module, tensors, scale, known, dtype))
            give_way()
    _check_finite(modules)
    return FolderWeights(modules, digest.digest())


def _check_module(
    module: FileModule, config: PeftConfig, shapes: Mapping[str, tuple[int, ...]], max_rank: int, owner: Owner
) -> None:
    """Refuse a rank above the limit, shapes that do not fit, and magnitudes where there should be none or some."""
    name, shape, rank = module.name, module.shape, config.rank_of(module.configured)
    if rank > max_rank:
        raise adapter_error(f"{name}: rank {rank} exceeds the limit max_lora_rank={max_rank}")
    if config.use_dora != (MAGNITUDE in module.keys):
        verb = "is missing: the configuration has" if config.use_dora else "has no use without"
        raise adapter_error(f"{name}: {MAGNITUDE} {verb} use_dora")
    expected = {A: (rank, shape.in_features), B: (shape.out_features, rank), MAGNITUDE: (shape.out_features,)}
    a, b = shapes[module.keys[A]], shapes[module.keys[B]]
    if len(a) != 2 or len(b) != 2:
        raise adapter_error(f"{name}: {A} and {B} must be matrices, got shapes {list(a)} and {list(b)}")
    for part, key in module.keys.items():
        if shapes[key] != expected[part]:
            raise adapter_error(
                f"{name}: {owner.kind} mismatch or wrong shape: {part} is {list(shapes[key])}, expected "
                f"{list(expected[part])} (rank {rank} by the configuration, {shape.in_features} -> "
                f"{shape.out_features} in {owner.words})"
            )


def _check_saved(config: PeftConfig, copied: Iterable[str]) -> None:
    """Modules that were trained as a whole are fine as long as that changed nothing, which `_check_copy` sees to."""
    held = {name.rpartition(".")[2] for name in copied}
    for name in config.modules_to_save:
        if name.rpartition(".")[2] not in held:
            raise adapter_error(f"fully trained modules (modules_to_save) are not served: {name[:80]!r}")


def _check_copy(key: str, tensor: Tensor, name: str, shape: ModuleShape) -> None:
    """The file's copy of a base weight must be that weight: a trained one is another model."""
    expected = (shape.in_features, shape.out_features) if shape.embedding else (shape.out_features, shape.in_features)
    if tuple(tensor.shape) != expected or shape.is_base is None or not shape.is_base(tensor):
        raise adapter_error(
            f"{name}: the file brings a weight of its own ({key}, {list(tensor.shape)}) that is not the served model's "
            f"({list(expected)}); fully trained modules are not served"
        )


def _served(
    module: FileModule,
    tensors: Mapping[str, Tensor],
    scale: float,
    known: Mapping[str, ModuleShape],
    dtype: torch.dtype,
) -> Iterator[tuple[str, LoraWeights]]:
    """The weights of each of the model's modules that the file's module stands for."""
    a, b = tensors[A].to(dtype), tensors[B]
    b = b.to(torch.promote_types(b.dtype, torch.float32)).t() * scale
    magnitudes: Tensor | None = tensors.get(MAGNITUDE)
    start = 0
    for target in module.targets:
        columns = slice(start, start + known[target].out_features)
        part, gain = b[:, columns], None
        if magnitudes is not None:
            gain = _gain(target, known[target], magnitudes[columns], a, part)
            part = part * gain
        yield target, LoraWeights(a, part.to(dtype).contiguous(), gain)
        start = columns.stop


def _gain(name: str, shape: ModuleShape, magnitude: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if shape.base is None:
        raise adapter_error(f"{name}: DoRA (use_dora) is not served here")
    return gains(magnitude, a, b.float(), shape.base)


def _check_finite(modules: Mapping[str, LoraWeights]) -> None:
    """Refuse what is not finite in the dtype served."""
    parts = [
        (name, part, tensor)
        for name, weights in modules.items()
        for part, tensor in ((MAGNITUDE, weights.gain), (A, weights.a), (B, weights.b))
        if tensor is not None
    ]
    # No sum with an infinity or a NaN in it is finite. In its own dtype: asked for float32, torch takes forty times as
    # long, and where the sum of finite weights overflows, they are looked at one by one.
    sums = []
    for _, _, tensor in parts:
        sums.append(tensor.sum().float())
        give_way()
    if bool(torch.stack(sums).isfinite().all()):
        return
    for name, part, tensor in parts:
        give_way()
        if not bool(torch.isfinite(tensor).all()):
            raise adapter_error(f"{name}: {part} is not finite in {str(tensor.dtype).removeprefix('torch.')}")
