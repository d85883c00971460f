"""Conversion of a file's tensors to packed rows: cast, scaled, lora_B transposed; checked, and digested."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.conversion import Matrix, convert
from ..device.dora import compute_gains
from ..device.layout import LoraWeights, PackedModules
from ..step_yield import yield_to_steps
from .errors import adapter_error
from .tensor_keys import MAGNITUDE, A, B, FileModule, ModelModules, ModuleShape

_DIGESTED_BYTES = 1 << 20
"""Bytes digested in one call, which releases the GIL."""
_ELEMENTS = 1 << 16
"""Numbers converted in one call, or one module if it has more."""


class StoredModule(NamedTuple):
    """One of the model's modules in a file, before its tensors are read."""

    name: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    module: FileModule
    start: int
    """First row in lora_B of `module`, which may hold several of the model's modules."""


def convert_modules(
    modules: Sequence[StoredModule], read: Callable[[StoredModule], dict[str, Tensor]], model: ModelModules
) -> tuple[PackedModules, bytes]:
    """Convert an adapter's modules to packed rows.

    Returns:
        The rows, and the digest: SHA-256 of every module's name, A and scaled B in the dtype of use, and for DoRA of
        the magnitude and B as the file has them. Files with equal digests compute the same on one base.

    Args:
        modules: In the order of their names.
        read: The contiguous tensors of a module by their part: A [r, in], B [out, r] and, for DoRA, MAGNITUDE [out].
        model: The model that the adapter is for.

    Raises:
        AdapterError: weights that are not finite in the dtype of use; magnitudes for a module that takes none.
    """
    # A few modules at a time are read, converted and digested, so that they stay in the processor's cache.
    dtype = model.layout.dtype
    digest = start_digest(modules, dtype)
    converted: dict[str, LoraWeights] = {}
    for group in group_modules(modules):
        stored = [read(module) for module in group]
        content = torch.empty(sum(tensors[A].numel() + tensors[B].numel() for tensors in stored), dtype=dtype)
        matrices = [
            matrix
            for module, tensors in zip(group, stored, strict=True)
            for matrix in (Matrix(tensors[A]), Matrix(tensors[B], True, module.scale))
        ]
        is_finite = convert(content, matrices)
        update_digest(digest, content.view(torch.uint8).numpy().data)
        parts = iter(content.split([matrix.values.numel() for matrix in matrices]))
        for module, tensors in zip(group, stored, strict=True):
            weights = LoraWeights(next(parts).view(module.rank, -1), next(parts).view(module.rank, -1))
            if MAGNITUDE in tensors:
                _digest_magnitude(digest, module, tensors)
                weights = _with_gain(module, tensors, weights, model.shapes[module.name])
            if MAGNITUDE in tensors or not is_finite:
                _check_finite(module.name, weights)
            converted[module.name] = weights
        yield_to_steps()
    return model.layout.pack(converted), digest.digest()


def start_digest(modules: Sequence[StoredModule], dtype: torch.dtype) -> Any:
    """Return the hash of the modules' names and shapes, without the weights yet."""
    return hashlib.sha256(repr([(*module[:4], str(dtype)) for module in modules]).encode())


def update_digest(digest: Any, content: memoryview) -> None:
    """Add weights to a hash, in pieces."""
    for first in range(0, len(content), _DIGESTED_BYTES):
        yield_to_steps()
        digest.update(content[first : first + _DIGESTED_BYTES])


def group_modules(modules: Sequence[StoredModule]) -> Iterator[Sequence[StoredModule]]:
    """Split modules into groups of adjacent ones with few numbers in all; a large module is alone."""
    first = size = 0
    for index, module in enumerate(modules):
        more = module.rank * (module.in_features + module.out_features)
        if index > first and size + more > _ELEMENTS:
            yield modules[first:index]
            first, size = index, 0
        size += more
    yield modules[first:]


def _digest_magnitude(digest: Any, module: StoredModule, tensors: Mapping[str, Tensor]) -> None:
    """Add a DoRA module's magnitude and its B before rounding, from which the gain is computed."""
    b, magnitude = tensors[B], tensors[MAGNITUDE]
    digest.update(f"{module.name}|{module.scale}|{b.dtype}|{magnitude.dtype}\n".encode())
    for part in (b, magnitude):
        digest.update(part.view(torch.uint8).numpy().data)


def _with_gain(
    module: StoredModule, tensors: Mapping[str, Tensor], weights: LoraWeights, shape: ModuleShape
) -> LoraWeights:
    if shape.base is None:
        raise adapter_error(f"{module.name}: DoRA (use_dora) is not served on experts")
    b = Matrix(tensors[B], scale=module.scale).scaled().t()
    gain = compute_gains(tensors[MAGNITUDE], weights.a, b.float(), shape.base)
    return LoraWeights(weights.a, (b * gain).to(weights.b.dtype).contiguous(), gain)


def _check_finite(name: str, weights: LoraWeights) -> None:
    """Refuse (AdapterError) weights that are not finite in the dtype of use."""
    for part, tensor in ((MAGNITUDE, weights.gain), (A, weights.a), (B, weights.b)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise adapter_error(f"{name}: {part} is not finite in {str(tensor.dtype).removeprefix('torch.')}")
