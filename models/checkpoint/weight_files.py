"""Weight files of a folder: their tensors, and the check that these are the model's."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.out_of_memory import is_out_of_memory
from ...platform.core.errors import InvalidRequestError, NotFoundError
from ...platform.core.sampling_params import quote_for_error
from ..layers.weights import Weight, WeightSlot
from .json_files import read_json

_INDEX_SUFFIX = ".index.json"
# Names of weight files, in the order in which they are looked for.
_USUAL = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Dtypes of stored weights: those of eight bits and fewer mean nothing without their scales.
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Most tensor names of each kind in an error.
_MAX_NAMED = 8


class StoredTensor(NamedTuple):
    """Tensor of a checkpoint that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], Weight]

    def dense(self) -> Tensor:
        """Read it as a plain tensor."""
        value = self.read()
        return value if isinstance(value, Tensor) else value.dequantized()


def read_weights(folder: Path, param: str, *, extra: Sequence[str] = (), hint: str = "") -> dict[str, StoredTensor]:
    """Tensors of a directory, or of one safetensors file, by their names; a directory may have pickles of tensors.

    Args:
        param: Parameter that errors name.
        extra: File names that are looked for after the usual ones.
        hint: Text that is added to the error when files are missing.

    Raises:
        NotFoundError: there are no weights, or some of an index's files are missing; the message names them.
        InvalidRequestError: a file or the index is broken, or is a pickle of anything but tensors.
    """
    if folder.is_file():
        return read_safetensors(folder, param)
    names = (*_USUAL, *extra)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        _refuse_consolidated(folder, param)
        raise NotFoundError(f"{folder} has no weights; looked for {', '.join(names)}{hint}", param=param)
    tensors: dict[str, StoredTensor] = {}
    for file in _shards(found, param, hint):
        tensors |= read_safetensors(file, param) if file.suffix == ".safetensors" else _read_pickle(file, param)
    return tensors


def _refuse_consolidated(folder: Path, param: str) -> None:
    """Raise when the weights have the names of their makers' own code, of which transformers' scripts make ours."""
    for pattern in ("consolidated*.pth", "consolidated*.safetensors"):
        for file in sorted(folder.glob(pattern))[:1]:
            raise InvalidRequestError(
                f"{file} is in the form of Meta's or Mistral's own code, which is not read; use the repository of the "
                "Hugging Face form (model*.safetensors), or convert it with transformers' convert_*_weights_to_hf.py",
                param=param,
            )


def _shards(found: Path, param: str, hint: str) -> list[Path]:
    """Weight files that `found` stands for, each once: itself, or those that it names if it is an index."""
    if not found.name.endswith(_INDEX_SUFFIX):
        return [found]
    weight_map: Any = read_json(found).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidRequestError(f"{found} has no weight_map", param=param)
    files = [found.parent / name for name in sorted({Path(str(name)).name for name in weight_map.values()})]
    missing = [
        quote_for_error(file.name) for file in files if not os.path.isfile(file)
    ]  # False for names that none can have
    if missing:
        raise NotFoundError(f"{found.parent} lacks {_listed(missing)}{hint}", param=param)
    return files


def read_pickle(file: Path, param: str) -> Any:
    """Content of a pickle of tensors and plain values.

    Raises:
        InvalidRequestError: it holds other things, or is damaged.
    """
    try:
        # Files of torch's present format are mapped, and read when they are needed.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise InvalidRequestError(
            f"{file} holds more than tensors, or is damaged, and is not loaded", param=param
        ) from error
    except Exception as error:  # a damaged pickle raises whatever it runs into
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidRequestError(f"{file} is not a readable file of tensors: {reason}", param=param) from error


def _read_pickle(file: Path, param: str) -> dict[str, StoredTensor]:
    state = read_pickle(file, param)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InvalidRequestError(f"{file} is not a mapping of names to tensors", param=param)
    return {str(name): StoredTensor(tuple(tensor.shape), tensor.detach) for name, tensor in state.items()}


def read_safetensors(file: Path, param: str) -> dict[str, StoredTensor]:
    """Tensors of one file, whose header alone is read now.

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
    """List of tensors that are missing, unexpected or of the wrong shape, with both shapes; "" when there are none."""
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
    """Read a tensor into its slot, unless it is elsewhere. With `integers` it is a table of integers, no weight.

    Raises:
        InvalidRequestError: it is not dense, or of another kind of numbers.
    """
    from safetensors import SafetensorError

    if slot.is_elsewhere:
        return
    try:
        tensor = stored.read()
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise InvalidRequestError(f"the tensor {name} cannot be read: {error}", param=param) from error
    if not isinstance(tensor, Tensor):
        slot.fill(tensor)
        return
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "has no values" if tensor.is_meta else "is sparse"
        raise InvalidRequestError(f"the tensor {name} {what}", param=param)
    if tensor.dtype not in (_INTEGERS if integers else _PLAIN):
        kind = "integers" if integers else "float32, bfloat16, float16 or float64, or have scales with it"
        raise InvalidRequestError(
            f"the tensor {name} is {str(tensor.dtype).removeprefix('torch.')}, it must be of {kind}", param=param
        )
    slot.load(tensor)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
