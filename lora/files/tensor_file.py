"""Files with an adapter's tensors: their code is never run, and shapes are known before data is read."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...platform.core.adapter_files import INDEX_FILES, WEIGHT_FILES, AdapterFolder
from ...platform.core.errors import OutriderError
from ..step_yield import yield_to_steps
from .errors import adapter_error, quote_path
from .foreign_adapters import tool_hint
from .pickle_file import load_pickle
from .tensor_header import FileLimits, HeaderEntry, InvalidFileError, read_header

_MAX_HEADER_BYTES = 16 << 20
"""Largest header. It has a line of JSON for each tensor; a large model's adapter has ten thousand of 150 bytes."""
_METADATA_BYTES = 1 << 20
"""Largest size of a header without its tensors."""
_ENTRY_BYTES = 512
"""Largest size of a tensor in a header."""
_LENGTH_BYTES = 8
"""Size of the header's length field, which comes first in the file."""
_PIECE = 1 << 20
"""Bytes read in one call, which releases the GIL."""

_CACHED = 16
"""Number of headers that are cached."""
_CACHED_BYTES = 1 << 20
"""Largest header that is cached: as objects it takes several times its size."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of the tensors that are served."""
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
"""Dtypes that can be read; not all of them are served."""


@dataclass(frozen=True, eq=False, slots=True)
class Header:
    """Header of a safetensors file, checked. Files with the same header share the object while it is cached."""

    entries: dict[str, HeaderEntry]
    shapes: dict[str, tuple[int, ...]]


class TensorFile(NamedTuple):
    """An open file."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    """Returns the contiguous tensor of a key. Check its shape first: this allocates its memory."""
    header: Header | None = None
    """Header of a safetensors file."""
    fill: Callable[[memoryview, int], None] | None = None
    """Fills a buffer from a safetensors file, starting at this byte of the data."""


@contextmanager
def open_tensors(folder: AdapterFolder, limits: FileLimits) -> Iterator[TensorFile]:
    """Open adapter_model.safetensors of a folder, or else adapter_model.bin.

    Raises:
        AdapterError: there is neither; the file is broken, which may show only when a tensor is read, or larger than
        `limits`.
    """
    name, file = next(((name, file) for name in WEIGHT_FILES if (file := folder.open(name))), ("", None))
    if file is None:
        for index in INDEX_FILES:
            if folder.has(index):
                raise adapter_error(f"an adapter in several files ({index}) is not served; {quote_path(folder.label)}")
        raise adapter_error(f"no {' or '.join(WEIGHT_FILES)} in {quote_path(folder.label)}{tool_hint(folder)}")
    shown_name = f"{folder.prefix}{name}"
    try:
        with file:
            if name.endswith(".safetensors"):
                yield _open_safetensors(file, limits)
            else:
                state = load_pickle(file, shown_name, limits)
                yield TensorFile(
                    {key: tuple(value.shape) for key, value in state.items()}, lambda key: state[key].contiguous()
                )
    except OutriderError:
        raise
    except (SafetensorError, InvalidFileError) as error:
        raise adapter_error(f"{shown_name} is not a valid safetensors file: {error}") from error
    except OSError as error:
        raise folder.error(name, f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a broken pickle raises many types
        raise folder.error(name, f"cannot be read: {type(error).__name__}: {error}") from error


def _open_safetensors(opened: FileIO, limits: FileLimits) -> TensorFile:
    """View a file. Each tensor is read when it is used, so that it is in the processor's cache then."""
    descriptor = opened.fileno()
    num_bytes = os.fstat(descriptor).st_size
    size = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    limit = min(_MAX_HEADER_BYTES, _METADATA_BYTES + _ENTRY_BYTES * limits.num_tensors)
    if size > limit:  # parsing it would take a minute, and gigabytes
        raise InvalidFileError(f"its header claims {size} bytes; the limit is {limit}")
    start = _LENGTH_BYTES + size
    if num_bytes < start:
        raise InvalidFileError(f"it has {num_bytes} bytes, fewer than its header claims ({start})")
    header = _header(_content(descriptor, _LENGTH_BYTES, size).tobytes(), num_bytes - start)
    entries = header.entries
    limits.check_number(len(entries))

    def read(key: str) -> Tensor:
        entry = entries[key]
        if entry.dtype not in DTYPES:
            raise adapter_error(f"{key} has dtype {entry.dtype}, which is not served")
        content = torch.from_numpy(_content(descriptor, start + entry.start, entry.stop - entry.start))
        return content.view(DTYPES[entry.dtype]).view(entry.shape)

    return TensorFile(header.shapes, read, header, lambda buffer, first: _fill(descriptor, buffer, start + first))


def _header(text: bytes, num_bytes: int) -> Header:
    """Return the header with this text, of a file with `num_bytes` of data; InvalidFileError, SafetensorError.

    Most adapters have the same header as an earlier one, byte for byte, which was checked then.
    """
    known = _known(hashlib.sha256(text).digest(), num_bytes) if len(text) <= _CACHED_BYTES else []
    if not known:
        _check(text, num_bytes)
        entries = read_header(text, num_bytes)
        known.append(Header(entries, {key: entry.shape for key, entry in entries.items()}))
    return known[0]


def _check(text: bytes, num_bytes: int) -> None:
    """Have the library check sizes, gaps and keys; SafetensorError. It maps the file, and the process would crash if
    the file were truncated meanwhile: so it gets one without data."""
    descriptor = os.memfd_create("header")
    try:
        os.pwrite(descriptor, len(text).to_bytes(_LENGTH_BYTES, "little") + text, 0)
        os.ftruncate(descriptor, _LENGTH_BYTES + len(text) + num_bytes)
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu") as checked:
            del checked
    finally:
        os.close(descriptor)


@functools.lru_cache(_CACHED)
def _known(digest: bytes, num_bytes: int) -> list[Header]:
    """Return the cache entry of a header and the size of its data: a list with the header, once it was checked."""
    return []


def _content(descriptor: int, start: int, size: int) -> NDArray[np.uint8]:
    """Read bytes of a file."""
    content = np.empty(size, np.uint8)
    _fill(descriptor, content.data, start)
    return content


def _fill(descriptor: int, rest: memoryview, start: int) -> None:
    """Read into a buffer, in pieces, and yield to steps between them."""
    while rest.nbytes:
        count = os.preadv(descriptor, [rest[:_PIECE]], start)
        if not count:
            raise EOFError(f"it has become shorter by {rest.nbytes} bytes")
        rest, start = rest[count:], start + count
        yield_to_steps()
