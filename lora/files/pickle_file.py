"""adapter_model.bin: a pickle of torch.save, whose size is checked before it is unpickled.

Unpickling with `weights_only` runs no code, but takes the time and memory that the file asks for: for tens of thousands
of tensors, or for numbers that are not in the file at all. The largest adapter of the model is the limit.
"""

from __future__ import annotations

import mmap
import os
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .peft_config import adapter_error, shown
from .tensor_header import FileLimits

_ENTRY_BYTES = 160
"""Largest size of a tensor's entry in the archive's directory."""
_PICKLED_BYTES = 400
"""Largest size of a tensor's part of the pickle."""
_OPERATIONS = 64
"""Largest number of operations in a tensor's part of the pickle."""
_REST = 1 << 16
"""Largest size of a file beside its tensors."""
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_BYTES = 20


def load_pickle(file: Path, limits: FileLimits) -> dict[str, Tensor]:
    """Return the tensors by key. With strides, a tensor may be larger than its part of the file.

    Raises:
        AdapterError: the file is larger than any adapter of the model, or holds something else than plain tensors.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > limits.num_bytes + (_ENTRY_BYTES + _PICKLED_BYTES) * limits.num_tensors + _REST:
            raise adapter_error(
                f"{shown(file)} has {size} bytes; at most {limits.num_bytes} are read for the served model and "
                "max_lora_rank"
            )
        if opened.read(4) == b"PK\3\4":
            _check_archive(file, opened, size, limits)
        else:
            _check_pickles(file, opened, limits)
        # The only global that allocates memory of any size. A pickle has its name in plain text.
        if size and _holds(opened, b"bytearray"):
            raise adapter_error(f"{shown(file)} holds something else than tensors (a bytearray)")
    # weights_only: the pickle may hold tensors and nothing that runs
    state: Any = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise adapter_error(f"{shown(file)} does not hold a dictionary of tensors")
    limits.check_number(len(state))
    for key, value in state.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise adapter_error(f"{shown(file)}: {str(key)[:200]} is no plain tensor ({value.layout}, {value.device})")
    return {str(key): value.detach() for key, value in state.items()}


def _holds(opened: BinaryIO, text: bytes) -> bool:
    with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def _check_archive(file: Path, opened: BinaryIO, size: int, limits: FileLimits) -> None:
    if _directory_bytes(opened, size) > _ENTRY_BYTES * limits.num_tensors + _REST:
        raise adapter_error(f"{shown(file)} has more entries than {limits.num_tensors} tensors need")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    # torch stores without compression; otherwise a small file may unpack to any size
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > size:
        raise adapter_error(f"{shown(file)} is compressed, which no file of torch.save is")
    pickles = [entry.file_size for entry in entries if entry.filename.endswith("data.pkl")]
    if sum(pickles) > _PICKLED_BYTES * limits.num_tensors + _REST:
        raise adapter_error(f"{shown(file)}: its pickle is larger than {limits.num_tensors} tensors need")


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


def _check_pickles(file: Path, opened: BinaryIO, limits: FileLimits) -> None:
    """Check the old format: five pickles, one of them with the tensors, and their data."""
    opened.seek(0)
    num_operations = 0
    for _ in range(5):
        for _ in pickletools.genops(opened):
            num_operations += 1
            if num_operations > _OPERATIONS * limits.num_tensors + _REST:
                raise adapter_error(f"{shown(file)}: its pickle is larger than {limits.num_tensors} tensors need")
