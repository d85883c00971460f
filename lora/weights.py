"""The tensors of a PEFT folder: keys and shapes checked against a model's modules, then read, scaled and digested.

The tensors' keys and shapes say what is adapted; adapter_config.json says how it is scaled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..platform.core.errors import OutriderError
from .peft_config import PeftConfig, adapter_error, read_config, shown

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_KEY = re.compile(
    r"^(?P<module>.+)\.(?:lora_(?P<linear>[AB])(?:\.[^.]+)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?)$"
)
# PEFT's save_pretrained copies the base weights of an adapted embedding or head into the adapter's file.
_COPY = re.compile(r"^(?P<module>.+?)(?:\.base_layer)?\.weight$")
_WRAPPERS = ("base_model.model.", "base_model.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REFUSED_KEYS = (
    (re.compile(r"\.lora_magnitude_vector"), "DoRA is not served"),
    (re.compile(r"\.bias$"), "a trained bias is not served"),
    (re.compile(r"\.lora_embedding_[AB]|(^|\.)embed_tokens\."), "an adapter on the embedding is not served"),
    (re.compile(r"(^|\.)lm_head\."), "an adapter on lm_head is not served"),
)


class ModuleShape(NamedTuple):
    """What the base model has under a module's name."""

    in_features: int
    """The vocabulary for an embedding."""
    out_features: int
    embedding: bool = False
    """A table that is looked up; its adapters have lora_embedding_A and _B instead of lora_A and lora_B."""
    is_base: Callable[[Tensor], bool] | None = None
    """Whether a tensor equals the module's own weight, for the copies of it that PEFT writes; None: copies are not
    served."""


class Owner(NamedTuple):
    """The model that weights are for, in messages."""

    kind: str
    words: str


BASE, DRAFTER = Owner("base", "the served model"), Owner("drafter", "the drafter")


class LoraWeights(NamedTuple):
    """One module's weights, in the dtype served."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[r, out]: PEFT's lora_B transposed, the scale folded in."""


class FolderWeights(NamedTuple):
    """A folder's content."""

    modules: dict[str, LoraWeights]
    digest: bytes
    """SHA-256 of every adapted module's name, scale and tensors."""

    @property
    def rank(self) -> int:
        """The largest of the modules."""
        return max(len(part.a) for part in self.modules.values())


class _Tensors(NamedTuple):
    """An open weights file: shapes before any data is read."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@contextmanager
def _open_weights(folder: Path) -> Iterator[_Tensors]:
    file = next((folder / name for name in WEIGHT_FILES if os.path.isfile(folder / name)), None)
    if file is None:
        raise adapter_error(f"no {' or '.join(WEIGHT_FILES)} in {shown(folder)}")
    try:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt", device="cpu") as opened:
                shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
                yield _Tensors(shapes, opened.get_tensor)
        else:
            # weights_only: the pickle may hold tensors and nothing that runs
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise adapter_error(f"{shown(file)} does not hold a dictionary of tensors")
            yield _Tensors({str(key): tuple(value.shape) for key, value in state.items()}, state.__getitem__)
    except OutriderError:
        raise
    except SafetensorError as error:
        raise adapter_error(f"{shown(file)} is not a valid safetensors file: {error}") from error
    except Exception as error:  # a broken pickle or a vanished file fails in many ways; all mean the same here
        raise adapter_error(f"cannot read {shown(file)}: {type(error).__name__}: {error}") from error


def _find_module(module: str, known: Mapping[str, ModuleShape]) -> str | None:
    """The base model's name for a PEFT key's module: PEFT adds prefixes, and may have been given the inner model."""
    for wrapper in _WRAPPERS:
        if module.startswith(wrapper):
            module = module[len(wrapper) :]
            break
    return next((name for name in (module, f"model.{module}") if name in known), None)


def _module_name(key: str, module: str, known: Mapping[str, ModuleShape], owner: Owner) -> str:
    name = _find_module(module, known)
    if name is not None:
        return name
    _check_refused(key, f"{module}.")
    for wrapper in _WRAPPERS:
        module = module.removeprefix(wrapper)
    raise adapter_error(f"{owner.kind} mismatch: {owner.words} has no linear module {module!r} (tensor {key})")


def _check_refused(key: str, text: str) -> None:
    for pattern, message in _REFUSED_KEYS:
        if pattern.search(text):
            raise adapter_error(f"{message} ({key})")


def _group(
    shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleShape], owner: Owner
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Tensor keys by module and part ("A", "B"), and the modules of which the file holds a copy by that copy's key;
    refuses keys that are nothing served."""
    modules: dict[str, dict[str, str]] = {}
    copies: dict[str, str] = {}
    for key in sorted(shapes):
        match = _KEY.match(key)
        if match is None:
            copy = _COPY.match(key)
            copied = _find_module(copy["module"], known) if copy else None
            if copied is not None and known[copied].is_base is not None:
                copies[key] = copied
                continue
            _check_refused(key, key)
            raise adapter_error(f"tensor {key} is no LoRA weight of a linear module; only those are served")
        name = _module_name(key, match["module"], known, owner)
        if known[name].embedding != bool(match["embedding"]):
            expected = "lora_embedding_A and lora_embedding_B" if known[name].embedding else "lora_A and lora_B"
            raise adapter_error(f"{name}: an adapter here has {expected}, not {key}")
        part, parts = match["embedding"] or match["linear"], modules.setdefault(name, {})
        if part in parts:
            raise adapter_error(f"two tensors for the same weight: {parts[part]} and {key}")
        parts[part] = key
    if not modules:
        raise adapter_error("the adapter holds no LoRA weights")
    for name, parts in modules.items():
        for part in "AB":
            if part not in parts:
                raise adapter_error(f"{name}: lora_{part} is missing")
    return modules, copies


def _check_shapes(
    name: str, a: tuple[int, ...], b: tuple[int, ...], shape: ModuleShape, rank: int, owner: Owner
) -> None:
    if len(a) != 2 or len(b) != 2:
        raise adapter_error(f"{name}: lora_A and lora_B must be matrices, got shapes {list(a)} and {list(b)}")
    for part, got, expected in (("A", a, (rank, shape.in_features)), ("B", b, (shape.out_features, rank))):
        if got != expected:
            raise adapter_error(
                f"{name}: {owner.kind} mismatch or wrong shape: lora_{part} is {list(got)}, expected {list(expected)} "
                f"(rank {rank} by the configuration, {shape.in_features} -> {shape.out_features} in {owner.words})"
            )


def _check_copy(key: str, tensor: Tensor, name: str, shape: ModuleShape) -> None:
    """The file's copy of a base weight must be that weight: a trained one is another model."""
    expected = (shape.in_features, shape.out_features) if shape.embedding else (shape.out_features, shape.in_features)
    if tuple(tensor.shape) != expected or shape.is_base is None or not shape.is_base(tensor):
        raise adapter_error(
            f"{name}: the file brings a weight of its own ({key}, {list(tensor.shape)}) that is not the served model's "
            f"({list(expected)}); fully trained modules are not served"
        )


def _served(name: str, part: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in the dtype served; refuses what is not finite there."""
    result = tensor.to(dtype).clone(memory_format=torch.contiguous_format)
    if not bool(torch.isfinite(result).all()):
        raise adapter_error(f"{name}: lora_{part} is not finite in {str(dtype).removeprefix('torch.')}")
    return result


def _checked_rank(config: PeftConfig, name: str, max_rank: int) -> int:
    rank = config.rank_of(name)
    if rank > max_rank:
        raise adapter_error(f"{name}: rank {rank} exceeds the limit max_lora_rank={max_rank}")
    return rank


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
    with _open_weights(folder) as weights:
        groups, copies = _group(weights.shapes, known, owner)
        for name, parts in sorted(groups.items()):
            shapes = (weights.shapes[parts["A"]], weights.shapes[parts["B"]])
            _check_shapes(name, *shapes, known[name], _checked_rank(config, name, max_rank), owner)
        for key, name in copies.items():
            _check_copy(key, weights.read(key), name, known[name])
        for name, parts in sorted(groups.items()):
            a, b, scale = weights.read(parts["A"]), weights.read(parts["B"]), config.scale_of(name)
            for part, tensor in (("A", a), ("B", b)):
                if tensor.dtype not in _FLOATS:
                    raise adapter_error(f"{name}: lora_{part} has dtype {tensor.dtype}, which is not served")
                digest.update(f"{name}|{part}|{scale!r}|{tensor.dtype}|{list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
            folded = b.to(torch.promote_types(b.dtype, torch.float32)).t() * scale
            modules[name] = LoraWeights(_served(name, "A", a, dtype), _served(name, "B", folded, dtype))
    return FolderWeights(modules, digest.digest())
