"""An adapter as served: parsed from a PEFT folder, checked against the base model, told apart by its content.

The tensors' keys and shapes say what is adapted; adapter_config.json says how it is scaled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..platform.core.errors import OutriderError
from .peft_config import CONFIG_FILE, PeftConfig, adapter_error, read_config

Fingerprint = tuple[tuple[str, int, int], ...]
"""(file, modification time in ns, size) of an adapter's files: they have changed when it has."""

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_KEY = re.compile(r"^(?P<module>.+)\.lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight$")
_WRAPPERS = ("base_model.model.", "base_model.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REFUSED_KEYS = (
    (re.compile(r"\.lora_embedding_[AB]|(^|\.)embed_tokens\."), "an adapter on the embedding is not served"),
    (re.compile(r"(^|\.)lm_head\."), "an adapter on lm_head is not served"),
    (re.compile(r"\.lora_magnitude_vector"), "DoRA is not served"),
    (re.compile(r"\.bias$"), "a trained bias is not served"),
)


class ModuleShape(NamedTuple):
    """What the base model has under a module's name."""

    in_features: int
    out_features: int


class LoraWeights(NamedTuple):
    """One module's weights, in the dtype served."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[r, out]: PEFT's lora_B transposed, the scale folded in."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A parsed adapter in host memory. Never changed."""

    digest: bytes
    """SHA-256 of what it computes: every adapted module's name, scale and tensors. Keys every cache."""
    rows: int
    """Rank rows that it takes on the device: the largest rank of its modules."""
    modules: dict[str, LoraWeights]
    """By module name of the base model, e.g. "model.layers.3.self_attn.q_proj"."""
    fingerprint: Fingerprint = ()
    """Of the files as they were before they were read."""


class _Tensors(NamedTuple):
    """An open weights file: shapes before any data is read."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@contextmanager
def _open_weights(folder: Path) -> Iterator[_Tensors]:
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise adapter_error(f"no {' or '.join(WEIGHT_FILES)} in {folder}")
    try:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt", device="cpu") as opened:
                shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
                yield _Tensors(shapes, opened.get_tensor)
        else:
            # weights_only: the pickle may hold tensors and nothing that runs
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise adapter_error(f"{file} does not hold a dictionary of tensors")
            yield _Tensors({str(key): tuple(value.shape) for key, value in state.items()}, state.__getitem__)
    except OutriderError:
        raise
    except SafetensorError as error:
        raise adapter_error(f"{file} is not a valid safetensors file: {error}") from error
    except Exception as error:  # a broken pickle or a vanished file fails in many ways; all mean the same here
        raise adapter_error(f"cannot read {file}: {type(error).__name__}: {error}") from error


def _module_name(key: str, module: str, known: Mapping[str, ModuleShape]) -> str:
    """The base model's name for a PEFT key's module: PEFT adds prefixes, and may have been given the inner model."""
    for wrapper in _WRAPPERS:
        if module.startswith(wrapper):
            module = module[len(wrapper) :]
            break
    for candidate in (module, f"model.{module}"):
        if candidate in known:
            return candidate
    for pattern, message in _REFUSED_KEYS:
        if pattern.search(f"{module}."):
            raise adapter_error(f"{message} ({key})")
    raise adapter_error(f"base mismatch: the served model has no linear module {module!r} (tensor {key})")


def _group(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleShape]) -> dict[str, dict[str, str]]:
    """Tensor keys by module and part ("A", "B"); refuses keys that are nothing served."""
    modules: dict[str, dict[str, str]] = {}
    for key in sorted(shapes):
        match = _KEY.match(key)
        if match is None:
            for pattern, message in _REFUSED_KEYS:
                if pattern.search(key):
                    raise adapter_error(f"{message} ({key})")
            raise adapter_error(f"tensor {key} is no LoRA weight of a linear module; only those are served")
        parts = modules.setdefault(_module_name(key, match["module"], known), {})
        if match["part"] in parts:
            raise adapter_error(f"two tensors for the same weight: {parts[match['part']]} and {key}")
        parts[match["part"]] = key
    if not modules:
        raise adapter_error("the adapter holds no LoRA weights")
    for name, parts in modules.items():
        for part in "AB":
            if part not in parts:
                raise adapter_error(f"{name}: lora_{part} is missing")
    return modules


def _check_shapes(
    name: str, a: tuple[int, ...], b: tuple[int, ...], shape: ModuleShape, config: PeftConfig, max_rank: int
) -> None:
    if len(a) != 2 or len(b) != 2:
        raise adapter_error(f"{name}: lora_A and lora_B must be matrices, got shapes {list(a)} and {list(b)}")
    rank = config.rank_of(name)
    if rank > max_rank:
        raise adapter_error(f"{name}: rank {rank} exceeds the limit max_lora_rank={max_rank}")
    for part, got, expected in (("A", a, (rank, shape.in_features)), ("B", b, (shape.out_features, rank))):
        if got != expected:
            raise adapter_error(
                f"{name}: base mismatch or wrong shape: lora_{part} is {list(got)}, expected {list(expected)} "
                f"(rank {rank} by the configuration, {shape.in_features} -> {shape.out_features} in the served model)"
            )


def _served(name: str, part: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in the dtype served; refuses what is not finite there."""
    result = tensor.to(dtype).clone(memory_format=torch.contiguous_format)
    if not bool(torch.isfinite(result).all()):
        raise adapter_error(f"{name}: lora_{part} is not finite in {str(dtype).removeprefix('torch.')}")
    return result


def fingerprint(path: str) -> Fingerprint:
    """Of an adapter's folder; files that are missing are left out."""
    found = []
    for name in (CONFIG_FILE, *WEIGHT_FILES):
        try:
            status = os.stat(os.path.join(path, name))
        except (OSError, ValueError):  # ValueError: a NUL in the path
            continue
        found.append((name, status.st_mtime_ns, status.st_size))
    return tuple(found)


def parse(path: str, known: Mapping[str, ModuleShape], *, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read a PEFT folder.

    Args:
        path: The folder with adapter_config.json and adapter_model.safetensors (or .bin).
        known: The linear modules of the base model by their Hugging Face names.
        max_rank: The largest rank served.
        dtype: The dtype in which the adapter will be used.

    Raises:
        AdapterError: files missing or broken, something that is not served, a rank above `max_rank`, a module that the
            base does not have or that has another shape there, weights that are not finite.
    """
    folder, files = Path(path), fingerprint(path)
    if not os.path.isdir(path):
        raise adapter_error(f"the adapter's folder {path[:200]!r} does not exist")
    config = read_config(folder)
    modules: dict[str, LoraWeights] = {}
    digest = hashlib.sha256()
    with _open_weights(folder) as weights:
        groups = _group(weights.shapes, known)
        for name, parts in sorted(groups.items()):
            shapes = (weights.shapes[parts["A"]], weights.shapes[parts["B"]])
            _check_shapes(name, *shapes, known[name], config, max_rank)
        for name, parts in sorted(groups.items()):
            a, b, scale = weights.read(parts["A"]), weights.read(parts["B"]), config.scale_of(name)
            for part, tensor in (("A", a), ("B", b)):
                if tensor.dtype not in _FLOATS:
                    raise adapter_error(f"{name}: lora_{part} has dtype {tensor.dtype}, which is not served")
                digest.update(f"{name}|{part}|{scale!r}|{tensor.dtype}|{list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
            folded = b.to(torch.promote_types(b.dtype, torch.float32)).t() * scale
            modules[name] = LoraWeights(_served(name, "A", a, dtype), _served(name, "B", folded, dtype))
    return Adapter(digest.digest(), max(len(part.a) for part in modules.values()), modules, files)
