"""The file with an adapter's tensors, opened so that nothing in it runs and shapes are known before data is read."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..platform.core.errors import OutriderError
from .pacing import give_way
from .peft_config import adapter_error, shown

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

# A header is a line of JSON for each tensor; an adapter of a large model has ten thousand of 150 bytes.
_MAX_HEADER_BYTES = 16 << 20
_PIECE = 1 << 17
"""Bytes that are read at once."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Of the tensors that can be read; which of them are served is said elsewhere."""


class TensorFile(NamedTuple):
    """An open file."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFile]:
    """adapter_model.safetensors of a folder, or else adapter_model.bin.

    Raises:
        AdapterError: there is neither, or it is broken, then or while its tensors are read.
    """
    file = next((folder / name for name in WEIGHT_FILES if os.path.isfile(folder / name)), None)
    if file is None:
        for name in WEIGHT_FILES:
            if os.path.isfile(folder / f"{name}.index.json"):
                raise adapter_error(f"an adapter in several files ({name}.index.json) is not served; {shown(folder)}")
        raise adapter_error(f"no {' or '.join(WEIGHT_FILES)} in {shown(folder)}")
    try:
        if file.suffix == ".safetensors":
            _check_header(file)
            yield _read_safetensors(file)
        else:
            state = _load_pickle(file)
            yield TensorFile({key: tuple(value.shape) for key, value in state.items()}, state.__getitem__)
    except OutriderError:
        raise
    except SafetensorError as error:
        raise adapter_error(f"{shown(file)} is not a valid safetensors file: {error}") from error
    except Exception as error:  # a broken pickle or a vanished file fails in many ways; all mean the same here
        raise adapter_error(f"cannot read {shown(file)}: {type(error).__name__}: {error}") from error


def _check_header(file: Path) -> None:
    """The library parses headers of up to 100 MB: a minute, and gigabytes."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise adapter_error(
            f"{shown(file)} is not a valid safetensors file: its header claims {size} bytes; the limit is "
            f"{_MAX_HEADER_BYTES}"
        )


def _content(file: Path) -> NDArray[np.uint8]:
    """All of a file, in pieces: others get their turn in between."""
    with file.open("rb", buffering=0) as opened:
        content = np.empty(os.fstat(opened.fileno()).st_size, np.uint8)
        rest = content.data
        while rest.nbytes:
            count = opened.readinto(rest[:_PIECE])
            if not count:
                raise EOFError(f"it has become shorter by {rest.nbytes} bytes")
            rest = rest[count:]
            give_way()
    return content


def _read_safetensors(file: Path) -> TensorFile:
    """All of it is read, and its tensors are views: the library takes 50 µs for each of hundreds."""
    with safe_open(str(file), framework="pt", device="cpu") as opened:  # checks the header: sizes, and no gaps
        del opened
    content = torch.from_numpy(_content(file))
    size = int.from_bytes(content[:8].numpy().tobytes(), "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size].numpy().tobytes())
    header.pop("__metadata__", None)
    data = content[8 + size :]

    def read(key: str) -> Tensor:
        entry = header[key]
        if entry["dtype"] not in _DTYPES:
            raise adapter_error(f"{key} has dtype {entry['dtype']}, which is not served")
        start, stop = entry["data_offsets"]
        part = data[start:stop]
        if part.data_ptr() % 8:
            part = part.clone()  # the format does not align its tensors
        return part.view(_DTYPES[entry["dtype"]]).view(entry["shape"])

    return TensorFile({key: tuple(entry["shape"]) for key, entry in header.items()}, read)


def _load_pickle(file: Path) -> dict[str, Tensor]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        # torch stores without compression; otherwise a small file may unpack to any size
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > file.stat().st_size:
            raise adapter_error(f"{shown(file)} is compressed, which no file of torch.save is")
    # weights_only: the pickle may hold tensors and nothing that runs
    state: Any = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise adapter_error(f"{shown(file)} does not hold a dictionary of tensors")
    tensors = {str(key): value.detach() for key, value in state.items()}
    for key, value in tensors.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise adapter_error(f"{shown(file)}: {key} is no plain tensor ({value.layout}, {value.device})")
    return tensors
