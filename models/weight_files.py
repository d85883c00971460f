"""Weight files: which ones there are, what tensors they hold, and whether those are what a model wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..platform.core.errors import InvalidRequestError, NotFoundError
from .config import read_json
from .layers.weights import WeightSlot

INDEX_SUFFIX = ".index.json"
# What weights are stored in: eight bits and fewer mean nothing without their scales.
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# How many tensor names an error lists of each kind.
_MAX_NAMED = 8


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def shards(found: Path, param: str, hint: str = "") -> list[Path]:
    """The weight files, each once, that `found` stands for: itself, or those that it names if it is an index.

    Args:
        found: ".../model.safetensors", ".../model.safetensors.index.json", ...
        param: of the errors.
        hint: said where files are missing.

    Raises:
        NotFoundError: some are missing; the message names them.
        InvalidRequestError: the index is broken.
    """
    files = [found]
    if found.name.endswith(INDEX_SUFFIX):
        weight_map: Any = read_json(found).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidRequestError(f"{found} has no weight_map", param=param)
        files = [found.parent / name for name in sorted({Path(str(name)).name for name in weight_map.values()})]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFoundError(f"{found.parent} lacks {', '.join(missing)}{hint}", param=param)
    return files


def read_safetensors(file: Path, param: str) -> dict[str, StoredTensor]:
    """The tensors of one file, of which the header alone is read now.

    Raises:
        InvalidRequestError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(file, framework="pt")
        return {
            name: StoredTensor(tuple(opened.get_slice(name).get_shape()), partial(opened.get_tensor, name))
            for name in opened.keys()  # noqa: SIM118  # not a mapping
        }
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(f"{file} is not a readable safetensors file: {error}", param=param) from error


def misfits(slots: Mapping[str, WeightSlot], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Which tensors are missing, unexpected or of the wrong shape, with both shapes; "" if all is as it should be."""
    problems = {
        "missing": [name for name in slots if name not in shapes],
        "unexpected": [name for name in shapes if name not in slots],
        "of the wrong shape": [
            f"{name} {list(shapes[name])} instead of {list(slot.shape)}"
            for name, slot in slots.items()
            if name in shapes and shapes[name] != slot.shape
        ],
    }
    return "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)


def load_into(slot: WeightSlot, name: str, stored: StoredTensor, param: str, *, integers: bool = False) -> None:
    """Read a tensor into its slot. `integers`: it is a table of numbers, and no weight.

    Raises:
        InvalidRequestError: it is not dense, or of another kind of numbers.
    """
    from safetensors import SafetensorError

    try:
        tensor = stored.read()
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InvalidRequestError(f"the tensor {name} cannot be read: {error}", param=param) from error
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "has no values" if tensor.is_meta else "is sparse"
        raise InvalidRequestError(f"the tensor {name} {what}", param=param)
    if tensor.dtype not in (_INTEGERS if integers else _PLAIN):
        kind = "integers" if integers else "float32, bfloat16, float16 or float64: quantized weights are not read"
        raise InvalidRequestError(
            f"the tensor {name} is {str(tensor.dtype).removeprefix('torch.')}, it must be of {kind}", param=param
        )
    slot.load(tensor)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
