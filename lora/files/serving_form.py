"""A file's weights in the form served: cast, scaled, lora_B transposed; checked, and told apart by their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.conversion import Matrix, convert
from ..device.dora import BaseWeight, gains
from ..tiers.step_signal import give_way
from .peft_config import adapter_error
from .tensor_keys import MAGNITUDE, A, B, FileModule

DIGESTED_BYTES = 1 << 17
"""Bytes that are digested at once."""
_ELEMENTS = 1 << 16
"""Numbers that are converted at once; one matrix at least."""


class LoraWeights(NamedTuple):
    """One module's weights, in the dtype served."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[r, out]: PEFT's lora_B transposed, the scale folded in, and the gain where there is one."""
    gain: Tensor | None = None
    """[out] float32: what the base weights' rows are multiplied with (DoRA); None: nothing."""


class StoredModule(NamedTuple):
    """One of the model's modules as a file has it, before its tensors are read."""

    name: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    module: FileModule
    start: int
    """Its first row in lora_B of `module`, which may be several of the model's."""


class StoredWeights(NamedTuple):
    """Its tensors; contiguous."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[out, r]."""
    magnitude: Tensor | None
    """[out]; DoRA's."""


def serve(
    sources: Sequence[StoredModule],
    read: Callable[[StoredModule], StoredWeights],
    dtype: torch.dtype,
    bases: Mapping[str, BaseWeight | None],
) -> tuple[dict[str, LoraWeights], bytes]:
    """The weights served by module, and the digest: SHA-256 of every module's name, A and scaled B in `dtype`; where
    there are magnitudes, of these and B as the file has them. Files with the same digest compute the same on one base.

    A few modules at a time go all the way, in the processor's cache: most of the time would be spent on the memory.

    Raises:
        AdapterError: weights that are not finite in `dtype`; magnitudes for a module without a base.
    """
    sizes = [s.rank * features for s in sources for features in (s.in_features, s.out_features)]
    content = torch.empty(sum(sizes), dtype=dtype)
    modules = dict(views(sources, content))
    digest = digest_start(sources, dtype)
    digested = content.view(torch.uint8).numpy().data
    is_finite, gained = True, False
    stop = 0
    for group in groups(sources):
        found = [read(source) for source in group]
        start, stop = stop, stop + sum(weights.a.numel() + weights.b.numel() for weights in found)
        is_finite &= convert(content[start:stop], list(_matrices(group, found)))
        for first in range(start * dtype.itemsize, stop * dtype.itemsize, DIGESTED_BYTES):
            give_way()
            digest.update(digested[first : min(first + DIGESTED_BYTES, stop * dtype.itemsize)])
        for source, weights in zip(group, found, strict=True):
            if weights.magnitude is not None:
                gained = True
                digest.update(f"{source.name}|{source.scale}|{weights.b.dtype}|{weights.magnitude.dtype}\n".encode())
                for part in (weights.b, weights.magnitude):  # the gain is of B before it is rounded
                    digest.update(part.view(torch.uint8).numpy().data)
                modules[source.name] = _with_gain(source, weights, modules[source.name], bases[source.name])
        give_way()
    if gained or not is_finite:
        _check_finite(modules)
    return modules, digest.digest()


def views(sources: Sequence[StoredModule], content: Tensor) -> Iterator[tuple[str, LoraWeights]]:
    """Each module's weights, which lie one after another."""
    sizes = [s.rank * features for s in sources for features in (s.in_features, s.out_features)]
    parts = iter(content.split(sizes))
    for s in sources:
        yield s.name, LoraWeights(next(parts).view(s.rank, -1), next(parts).view(s.rank, -1))


def digest_start(sources: Sequence[StoredModule], dtype: torch.dtype) -> Any:
    """The hash before anything of the weights is in it."""
    return hashlib.sha256(repr([(*s[:4], str(dtype)) for s in sources]).encode())


def groups(sources: Sequence[StoredModule]) -> Iterator[Sequence[StoredModule]]:
    """Neighbours that have few numbers together, or one of many."""
    first = size = 0
    for index, source in enumerate(sources):
        more = source.rank * (source.in_features + source.out_features)
        if index > first and size + more > _ELEMENTS:
            yield sources[first:index]
            first, size = index, 0
        size += more
    yield sources[first:]


def _matrices(group: Sequence[StoredModule], found: Sequence[StoredWeights]) -> Iterator[Matrix]:
    for source, weights in zip(group, found, strict=True):
        yield Matrix(weights.a)
        yield Matrix(weights.b, True, source.scale)


def _with_gain(
    source: StoredModule, stored: StoredWeights, served: LoraWeights, base: BaseWeight | None
) -> LoraWeights:
    if base is None:
        raise adapter_error(f"{source.name}: DoRA (use_dora) is not served here")
    assert stored.magnitude is not None
    b = Matrix(stored.b, scale=source.scale).scaled().t()
    gain = gains(stored.magnitude, served.a, b.float(), base)
    return LoraWeights(served.a, (b * gain).to(served.b.dtype).contiguous(), gain)


def _check_finite(modules: Mapping[str, LoraWeights]) -> None:
    """Refuse what is not finite in the dtype served."""
    for name, weights in modules.items():
        give_way()
        for part, tensor in ((MAGNITUDE, weights.gain), (A, weights.a), (B, weights.b)):
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise adapter_error(f"{name}: {part} is not finite in {str(tensor.dtype).removeprefix('torch.')}")
