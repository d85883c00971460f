"""adapter_model.bin: a pickle of torch.save, whose size is checked before it is unpickled.

Unpickling with `weights_only` runs no code, but the file determines its time and memory: it may have tens of thousands
of tensors, or claim numbers that are not in it. The largest adapter of the model is the limit.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from io import BytesIO, FileIO
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..step_yield import yield_to_steps
from .errors import adapter_error
from .tensor_header import FileLimits

_ENTRY_BYTES = 160
"""Largest size of a tensor's entry in the archive's directory."""
_PICKLED_BYTES = 400
"""Largest size of a tensor's part of the pickle."""
_OPERATIONS = 64
"""Largest number of operations in a tensor's part of the pickle."""
_REST = 1 << 16
"""Largest size of a file without its tensors."""
_PIECE = 1 << 20
"""Bytes that are read in one call."""
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_BYTES = 20


def load_pickle(file: FileIO, name: str, limits: FileLimits) -> dict[str, Tensor]:
    """Return the tensors by key. With strides, a tensor may be larger than its part of the file. The file is read into
    memory first, so that the checked bytes are the unpickled ones; errors call it `name`.

    Raises:
        AdapterError: the file is larger than any adapter of the model, or has something other than plain tensors.
    """
    most = limits.num_bytes + (_ENTRY_BYTES + _PICKLED_BYTES) * limits.num_tensors + _REST
    content = _read(file, most)
    size = max(len(content), os.fstat(file.fileno()).st_size)
    if size > most:
        raise adapter_error(
            f"{name} has {size} bytes; at most {limits.num_bytes} are read for the served model and max_lora_rank"
        )
    opened = BytesIO(content)
    if content[:4] == b"PK\3\4":
        _check_archive(name, opened, size, limits)
    else:
        _check_pickles(name, opened, limits)
    # The only global that allocates memory of any size. A pickle has its name in plain text.
    if b"bytearray" in content:
        raise adapter_error(f"{name} holds something else than tensors (a bytearray)")
    opened.seek(0)
    # weights_only: the pickle may hold tensors and no code
    state: Any = torch.load(opened, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise adapter_error(f"{name} does not hold a dictionary of tensors")
    limits.check_number(len(state))
    for key, value in state.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise adapter_error(f"{name}: {str(key)[:200]} is no plain tensor ({value.layout}, {value.device})")
    return {str(key): value.detach() for key, value in state.items()}


def _read(file: FileIO, most: int) -> bytes:
    """Read a file, or if it has more than `most` bytes, its first `most` + 1."""
    if os.fstat(file.fileno()).st_size > most:
        return b""
    content = bytearray()
    while len(content) <= most and (piece := file.read(_PIECE)):
        content += piece
        yield_to_steps()
    return bytes(content)


def _check_archive(name: str, opened: BinaryIO, size: int, limits: FileLimits) -> None:
    if _directory_bytes(opened, size) > _ENTRY_BYTES * limits.num_tensors + _REST:
        raise adapter_error(f"{name} has more entries than {limits.num_tensors} tensors need")
    with zipfile.ZipFile(opened) as archive:
        entries = archive.infolist()
    # torch stores without compression; otherwise a small file may unpack to any size
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > size:
        raise adapter_error(f"{name} is compressed, which no file of torch.save is")
    pickles = [entry.file_size for entry in entries if entry.filename.endswith("data.pkl")]
    if sum(pickles) > _PICKLED_BYTES * limits.num_tensors + _REST:
        raise adapter_error(f"{name}: its pickle is larger than {limits.num_tensors} tensors need")


def _directory_bytes(opened: BinaryIO, size: int) -> int:
    """Return the size of an archive's directory, from its end record; `zipfile` would make an object of every entry."""
    opened.seek(max(0, size - _END.size - 0xFFFF))
    tail = opened.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        return 0  # no archive: `zipfile` refuses it
    start = at - _LOCATOR_BYTES - _END_64.size
    if start >= 0 and tail[start : start + 4] == b"PK\6\6":
        return int(_END_64.unpack_from(tail, start)[8])
    return int(_END.unpack_from(tail, at)[5])


def _check_pickles(name: str, opened: BinaryIO, limits: FileLimits) -> None:
    """Check the old format: five pickles, one of them with the tensors, and their data."""
    opened.seek(0)
    num_operations = 0
    for _ in range(5):
        for _ in pickletools.genops(opened):
            num_operations += 1
            if num_operations > _OPERATIONS * limits.num_tensors + _REST:
                raise adapter_error(f"{name}: its pickle is larger than {limits.num_tensors} tensors need")
