"""The tensors of a PEFT folder: keys and shapes checked against a model's modules, then read.

The tensors' keys and shapes say what is adapted; adapter_config.json says how it is scaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .peft_config import PeftConfig, adapter_error, read_config, shown
from .read_plan import ReadPlans
from .serving_form import LoraWeights, StoredModule, StoredWeights, serve
from .tensor_file import TensorFile, open_tensors
from .tensor_keys import BASE, DRAFTER, MAGNITUDE, A, B, FileModule, ModuleShape, Owner, file_limits, group_keys

__all__ = [
    "BASE",
    "DRAFTER",
    "FolderWeights",
    "LoraWeights",
    "ModuleShape",
    "Owner",
    "read_weights",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class FolderWeights(NamedTuple):
    """A folder's content."""

    modules: Mapping[str, LoraWeights]
    digest: bytes
    """Dtype of what it computes; see `serving_form.serve`."""
    rank: int
    """The largest of the modules."""


def read_weights(
    folder: Path,
    known: Mapping[str, ModuleShape],
    max_rank: int,
    dtype: torch.dtype,
    owner: Owner = BASE,
    plans: ReadPlans | None = None,
) -> FolderWeights:
    """Read adapter_config.json and adapter_model.safetensors (or .bin) of `folder`, for a model with `known` modules,
    called `owner` in messages. `plans`: of files for the same model, rank and dtype.

    Raises:
        AdapterError: files missing or broken, something that is not served, a rank above `max_rank`, a module that the
            model does not have or that has another shape there, weights that are not finite in `dtype`.
    """
    try:
        config = read_config(folder)
    except OSError as error:  # no permission, or a path that got too long
        raise adapter_error(f"cannot read {shown(folder)}: {error.strerror}") from error
    with open_tensors(folder, file_limits(known, max_rank)) as file:
        planned = _read_planned(file, config, plans)
        if planned is not None:
            return planned
        found, copies = group_keys(file.shapes, known, owner)
        for module in found.values():
            _check_module(module, config, file.shapes, max_rank, owner)
        _check_saved(config, copies.values())
        for key, name in copies.items():
            _check_copy(key, file, name, known[name])
        sources = [
            source
            for _, module in sorted(found.items())
            for source in _sources(module, config.scale_of(module.configured), file.shapes, known)
        ]
        bases = {name: shape.base for name, shape in known.items()}
        modules, digest = serve(sources, lambda source: _read(source, file), dtype, bases)
        if plans is not None and file.header is not None and not copies:
            plans.keep(sources, file.header, config.form)
        return FolderWeights(modules, digest, max(source.rank for source in sources))


def _read_planned(file: TensorFile, config: PeftConfig, plans: ReadPlans | None) -> FolderWeights | None:
    """The weights of a file of a known form; None: it must be looked at more closely."""
    plan = plans.find(file.header, config.form) if plans is not None else None
    read = plan and plan.read(file, [config.scale_of(name) for name in plan.configured])
    return FolderWeights(*read, plan.rank) if plan and read else None


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


def _check_copy(key: str, file: TensorFile, name: str, shape: ModuleShape) -> None:
    """The file's copy of a base weight must be that weight: a trained one is another model."""
    expected = (shape.in_features, shape.out_features) if shape.embedding else (shape.out_features, shape.in_features)
    found = file.shapes[key]
    if found != expected or shape.is_base is None or not shape.is_base(file.read(key)):
        raise adapter_error(
            f"{name}: the file brings a weight of its own ({key}, {list(found)}) that is not the served model's "
            f"({list(expected)}); fully trained modules are not served"
        )


def _sources(
    module: FileModule, scale: float, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleShape]
) -> Iterator[StoredModule]:
    """Where the file has each of the model's modules that its module stands for."""
    rank, in_features = shapes[module.keys[A]]
    start = 0
    for target in module.targets:
        size = known[target].out_features if len(module.targets) > 1 else module.shape.out_features
        yield StoredModule(target, rank, in_features, size, scale, module, start)
        start += size


def _read(source: StoredModule, file: TensorFile) -> StoredWeights:
    module = source.module
    tensors = {part: file.read(key) for part, key in module.keys.items()}
    for part, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise adapter_error(f"{module.name}: {part} has dtype {tensor.dtype}, which is not served")
    rows = slice(source.start, source.start + source.out_features)
    magnitude = tensors.get(MAGNITUDE)
    return StoredWeights(tensors[A], tensors[B][rows], None if magnitude is None else magnitude[rows])
