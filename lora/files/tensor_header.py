"""Header of a safetensors file, checked before data is read: it is untrusted.

    8 bytes: length | JSON: {key: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__"} | data

The library has checked the file before (`tensor_file`), but does not return the positions of tensors, and the file may
have changed since. So all is checked here, too: every tensor's bytes match its shape, and all tensors together are the
data, without gaps and overlaps.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .errors import adapter_error

_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits of an element."""


class FileLimits(NamedTuple):
    """Size of the largest file that is read for a model."""

    num_tensors: int
    num_bytes: int

    def check_number(self, num_tensors: int) -> None:
        """Refuse (AdapterError) a file with too many tensors."""
        if num_tensors > self.num_tensors:
            raise adapter_error(
                f"the file holds {num_tensors} tensors; at most {self.num_tensors} are read for the served model"
            )


class InvalidFileError(Exception):
    """The file is no safetensors file; the message has the reason."""


class HeaderEntry(NamedTuple):
    """Dtype, shape and position of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the data."""
    stop: int
    """Byte after the last one."""


def read_header(text: bytes, num_bytes: int) -> dict[str, HeaderEntry]:
    """Return the tensors by key, for a file with `num_bytes` of data.

    Raises:
        InvalidFileError: the text is no header, or does not fit the data.
    """
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise InvalidFileError("its header is no JSON object")
    header.pop("__metadata__", None)
    entries = {key: _entry(key, value) for key, value in header.items()}
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != end:
            raise InvalidFileError(f"the data of {key[:200]!r} begin at byte {entry.start}, not at {end}")
        end = entry.stop
    if end != num_bytes:
        raise InvalidFileError(f"its tensors have {end} bytes, the file has {num_bytes}")
    return entries


def _entry(key: str, value: Any) -> HeaderEntry:
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        bits = _BITS[dtype]
        numbers = (start, stop, *shape)
    except (KeyError, TypeError, ValueError):
        raise InvalidFileError(f"its header has no dtype, shape and data_offsets for {key[:200]!r}") from None
    if type(shape) is not list or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise InvalidFileError(f"its header has wrong numbers for {key[:200]!r}")
    if not _is_text(key):
        raise InvalidFileError(f"the key {key[:200]!r} is no Unicode text")
    if _num_elements(shape) * bits != (stop - start) * 8:
        raise InvalidFileError(f"{key[:200]!r} has {stop - start} bytes, which is not what its shape takes")
    return HeaderEntry(dtype, tuple(shape), start, stop)


def _is_text(key: str) -> bool:
    """Return whether a key can be encoded as UTF-8, as in messages between processes: JSON may hold lone surrogates."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _num_elements(shape: list[int]) -> int:
    """Return the number of elements, if a file can hold them: the product of very many numbers would take hours."""
    count = 1
    for number in shape:
        count *= number
        if count >= 1 << 63:
            raise InvalidFileError("a shape has more elements than any file")
    return count
