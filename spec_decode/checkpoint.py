"""Reads the weight files of draft heads: safetensors, whole or sharded, and pickles of tensors and nothing else."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..models.layers.weights import WeightSlot
from ..models.weight_files import StoredTensor, load_into, misfits, read_safetensors, shards
from ..platform.core.errors import InvalidRequestError, NotFoundError

__all__ = ["StoredTensor", "fill", "fill_randomly", "read_tensors", "refuse"]

# In the order in which they are looked for.
SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
PARAM = "speculative_config"
"""The field that all errors are about."""
# Tensors that are no weights: the target's token ids, as offsets.
_TABLES = ("d2t",)


def refuse(message: str) -> InvalidRequestError:
    """The error for a draft that cannot be used."""
    return InvalidRequestError(f"{PARAM}: {message}", param=PARAM)


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
        raise NotFoundError(f"{path} has no weights; looked for {', '.join(names)}", param=PARAM)
    tensors: dict[str, StoredTensor] = {}
    for file in shards(found, PARAM):
        tensors |= read_safetensors(file, PARAM) if file.suffix == ".safetensors" else _read_pickle(file)
    return tensors


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
        InvalidRequestError: names what is missing, unexpected, of the wrong shape, with both shapes, or no weight.
    """
    problems = misfits(slots, {name: tensor.shape for name, tensor in tensors.items()})
    if problems:
        raise refuse(f"the weights in {path} do not fit its config.json or the target; {problems}")
    for name, slot in slots.items():
        load_into(slot, name, tensors[name], PARAM, integers=name in _TABLES)


@torch.inference_mode()
def fill_randomly(slots: Mapping[str, WeightSlot], seed: int) -> None:
    """Random weights that keep activations near 1; each tensor depends on the seed and its name alone."""
    for name, slot in slots.items():
        tensor = torch.ones(slot.shape)
        if slot.scale:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor.normal_(0.0, slot.scale, generator=generator)
        slot.load(tensor)
