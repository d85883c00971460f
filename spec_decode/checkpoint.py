"""Reads the weight files of draft heads: safetensors, whole or sharded, and pickles of tensors and nothing else."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.config import read_json
from ..models.layers.weights import WeightSlot
from ..platform.core.errors import InvalidRequestError, NotFoundError

# In the order in which they are looked for.
SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
# How many tensor names an error lists of each kind.
_MAX_NAMED = 8


def refuse(message: str) -> InvalidRequestError:
    """The error for a draft that cannot be used."""
    return InvalidRequestError(f"speculative_config: {message}", param="speculative_config")


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def read_tensors(path: Path, extra: Iterable[str] = ()) -> dict[str, StoredTensor]:
    """All tensors of a head's directory by the names in the files.

    Args:
        path: the directory.
        extra: file names that are looked for after the usual ones, such as "medusa_lm_head.pt".

    Raises:
        NotFoundError: there are no weights.
        InvalidRequestError: a file is broken, or is a pickle of anything but tensors.
    """
    names = (*SAFETENSORS, *PICKLES, *extra)
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise NotFoundError(f"{path} has no weights; looked for {', '.join(names)}", param="speculative_config")
    files = _sharded(found) if found.name.endswith(".index.json") else [found]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    return tensors


def _sharded(index: Path) -> list[Path]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise refuse(f"{index} has no weight_map")
    files = [index.parent / name for name in sorted({Path(str(name)).name for name in weight_map.values()})]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFoundError(f"{index.parent} lacks {', '.join(missing)}", param="speculative_config")
    return files


def _read_safetensors(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(file, framework="pt")
        return {
            name: StoredTensor(tuple(opened.get_slice(name).get_shape()), partial(opened.get_tensor, name))
            for name in opened.keys()  # noqa: SIM118  # not a mapping
        }
    except (OSError, SafetensorError) as error:
        raise refuse(f"{file} is not a readable safetensors file: {error}") from error


def _read_pickle(file: Path) -> dict[str, StoredTensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refuse(f"{file} holds more than tensors, or is damaged, and is not loaded") from error
    except Exception as error:  # a damaged pickle raises whatever it runs into
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise refuse(f"{file} is not a readable file of tensors: {reason}") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise refuse(f"{file} is not a mapping of names to tensors")
    return {str(name): StoredTensor(tuple(tensor.shape), tensor.detach) for name, tensor in state.items()}


@torch.inference_mode()
def fill(path: Path, slots: Mapping[str, WeightSlot], tensors: Mapping[str, StoredTensor]) -> None:
    """Load `tensors` into the `slots` of the same names.

    Raises:
        InvalidRequestError: names what is missing, unexpected or of the wrong shape, with both shapes.
    """
    problems = {
        "missing": [name for name in slots if name not in tensors],
        "unexpected": [name for name in tensors if name not in slots],
        "of the wrong shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(slot.shape)}"
            for name, slot in slots.items()
            if name in tensors and tensors[name].shape != slot.shape
        ],
    }
    found = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    if found:
        raise refuse(f"the weights in {path} do not fit its config.json or the target; {'; '.join(found)}")
    for name, slot in slots.items():
        slot.load(tensors[name].read())


@torch.inference_mode()
def fill_randomly(slots: Mapping[str, WeightSlot], seed: int) -> None:
    """Random weights that keep activations near 1; each tensor depends on the seed and its name alone."""
    for name, slot in slots.items():
        tensor = torch.ones(slot.shape)
        if slot.scale:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor.normal_(0.0, slot.scale, generator=generator)
        slot.load(tensor)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
