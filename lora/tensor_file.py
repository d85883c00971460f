"""The file with an adapter's tensors, opened so that nothing in it runs and shapes are known before data is read."""

from __future__ import annotations

import functools
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..platform.core.adapter_files import WEIGHT_FILES
from ..platform.core.errors import OutriderError
from .pacing import give_way
from .peft_config import adapter_error, shown
from .tensor_header import HeaderEntry, InvalidFileError, read_header

# A header is a line of JSON for each tensor; an adapter of a large model has ten thousand of 150 bytes.
_MAX_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
"""In front of the header: how long it is."""
_PIECE = 1 << 17
"""Bytes that are read at once."""

_REMEMBERED = 16
"""Headers..."""
_REMEMBERED_BYTES = 1 << 20
"""...of so many bytes at most: as objects they take several times as much."""

DTYPES = {
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


@dataclass(frozen=True, eq=False, slots=True)
class Header:
    """Of a safetensors file, found right. The same object for files with the same one, as long as it is remembered."""

    entries: dict[str, HeaderEntry]
    shapes: dict[str, tuple[int, ...]]


class TensorFile(NamedTuple):
    """An open file."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    """Of a key; contiguous."""
    header: Header | None = None
    """Of a safetensors file."""
    fill: Callable[[memoryview, int], None] | None = None
    """Fills a buffer from this byte of its data on."""


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
            with _open_safetensors(file) as tensors:
                yield tensors
        else:
            state = _load_pickle(file)
            yield TensorFile({key: tuple(value.shape) for key, value in state.items()}, state.__getitem__)
    except OutriderError:
        raise
    except (SafetensorError, InvalidFileError) as error:
        raise adapter_error(f"{shown(file)} is not a valid safetensors file: {error}") from error
    except Exception as error:  # a broken pickle or a vanished file fails in many ways; all mean the same here
        raise adapter_error(f"cannot read {shown(file)}: {type(error).__name__}: {error}") from error


@contextmanager
def _open_safetensors(file: Path) -> Iterator[TensorFile]:
    """Tensors are read when they are asked for: what is used at once is still in the processor's cache."""
    with file.open("rb", buffering=0) as opened:
        descriptor = opened.fileno()
        num_bytes = os.fstat(descriptor).st_size
        size = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        if size > _MAX_HEADER_BYTES:  # before it is read: parsing it would take a minute, and gigabytes
            raise InvalidFileError(f"its header claims {size} bytes; the limit is {_MAX_HEADER_BYTES}")
        start = _LENGTH_BYTES + size
        if num_bytes < start:
            raise InvalidFileError(f"it has {num_bytes} bytes, fewer than its header claims ({start})")
        header = _header(file, _content(descriptor, _LENGTH_BYTES, size).tobytes(), num_bytes - start)
        entries = header.entries

        def read(key: str) -> Tensor:
            entry = entries[key]
            if entry.dtype not in DTYPES:
                raise adapter_error(f"{key} has dtype {entry.dtype}, which is not served")
            content = torch.from_numpy(_content(descriptor, start + entry.start, entry.stop - entry.start))
            return content.view(DTYPES[entry.dtype]).view(entry.shape)

        yield TensorFile(header.shapes, read, header, lambda buffer, first: _fill(descriptor, buffer, start + first))


def _header(file: Path, text: bytes, num_bytes: int) -> Header:
    """The header with this text, of a file with `num_bytes` of data; InvalidFileError, SafetensorError.

    Most adapters have the same one as another before, byte for byte, and it was found right then.
    """
    known = _known(hashlib.sha256(text).digest(), num_bytes) if len(text) <= _REMEMBERED_BYTES else []
    if not known:
        with safe_open(str(file), framework="pt", device="cpu") as checked:  # sizes, gaps, keys
            del checked
        entries = read_header(text, num_bytes)
        known.append(Header(entries, {key: entry.shape for key, entry in entries.items()}))
    return known[0]


@functools.lru_cache(_REMEMBERED)
def _known(digest: bytes, num_bytes: int) -> list[Header]:
    """Of a header's text and the size of the data: where it is kept once it was found right."""
    return []


def _content(descriptor: int, start: int, size: int) -> NDArray[np.uint8]:
    """Bytes of a file."""
    content = np.empty(size, np.uint8)
    _fill(descriptor, content.data, start)
    return content


def _fill(descriptor: int, rest: memoryview, start: int) -> None:
    """The same into a buffer, in pieces: others get their turn in between."""
    while rest.nbytes:
        count = os.preadv(descriptor, [rest[:_PIECE]], start)
        if not count:
            raise EOFError(f"it has become shorter by {rest.nbytes} bytes")
        rest, start = rest[count:], start + count
        give_way()


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
    for key, value in state.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise adapter_error(f"{shown(file)}: {key} is no plain tensor ({value.layout}, {value.device})")
    return {str(key): value.detach().contiguous() for key, value in state.items()}
