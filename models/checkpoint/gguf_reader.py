"""Fields and tensors of GGUF files, as the package `gguf` reads them; a model may be split into several files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...platform.core.errors import InvalidRequestError, NotFoundError, UnsupportedModelError

# Name of one of several files: its number from 1 on, and how many there are.
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_COUNT, _NUMBER = "split.count", "split.no"


class GgufFile(NamedTuple):
    """Content of a GGUF file, or of all parts of one."""

    fields: dict[str, Any]
    """Fields by their names, those of the first part."""
    tensors: dict[str, Any]
    """Tensors of the package's reader by their names; their data are read when they are needed."""

    @property
    def is_split(self) -> bool:
        """True: the model has several files."""
        return bool(self.fields.get(_COUNT, 1) > 1)


def open_gguf(path: Path, *, tensors: bool = True) -> GgufFile:
    """Read fields and the offsets of all tensors; of a split model, `path` is the first part.

    Args:
        tensors: False when fields suffice, which are in the first part.

    Raises:
        NotFoundError: a part is missing; the message names it.
        InvalidRequestError: `path` is not the first part.
    """
    reader = _open(path)
    fields = _contents(reader)
    found = GgufFile(fields, {tensor.name: tensor for tensor in reader.tensors})
    for part in _other_parts(path, fields) if tensors and found.is_split else ():
        found.tensors.update((tensor.name, tensor) for tensor in _open(part).tensors)
    return found


def _other_parts(path: Path, fields: dict[str, Any]) -> list[Path]:
    count = fields[_COUNT]
    name = _PART.search(path.name)
    if name is None or int(name[2]) != count or fields.get(_NUMBER, 0) != 0 or int(name[1]) != 1:
        raise InvalidRequestError(
            f"{path} is part {fields.get(_NUMBER, 0) + 1} of {count} of a model; give the first part, whose name ends "
            f"in -00001-of-{count:05d}.gguf",
            param="model",
        )
    parts = [path.with_name(f"{path.name[: name.start()]}-{n:05d}-of-{count:05d}.gguf") for n in range(2, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise NotFoundError(f"{path.parent} lacks {', '.join(missing[:8])}, parts of {path.name}", param="model")
    return parts


@contextmanager
def reading(path: Path, what: str = "the file") -> Iterator[None]:
    """Context in which whatever a damaged file makes the package raise becomes an error that names `path`.

    Raises:
        InvalidRequestError: the file is damaged, or its package is not installed.
    """
    try:
        yield
    except (InvalidRequestError, NotFoundError, UnsupportedModelError):
        raise
    except ImportError as error:
        raise InvalidRequestError(
            f"{path} is read by the package gguf, which is not installed: pip install 'outrider[gguf]'", param="model"
        ) from error
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidRequestError(f"{path}: {what} cannot be read as GGUF: {reason}", param="model") from error


def _open(path: Path) -> Any:
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """The package's reader, which makes an array of each element of an array: seconds for a vocabulary."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            begin = orig_offs + 12
            if kind == GGUFValueType.STRING:
                end = begin
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
                values = data[begin:end]
            else:
                values = self._get(begin, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
                end = begin + values.nbytes
            head = data[orig_offs:begin]
            return end - orig_offs, [head, values], [1], [GGUFValueType.ARRAY, GGUFValueType(kind)]

    return Reader(path)


def _contents(reader: Any) -> dict[str, Any]:
    from gguf import GGUFValueType

    of_strings = [GGUFValueType.ARRAY, GGUFValueType.STRING]
    return {
        name: list(_strings(field.parts[-1])) if field.types == of_strings else field.contents()
        for name, field in reader.fields.items()
    }


def _strings(packed: Any) -> Iterator[str]:
    """Elements of an array of strings, each after its length."""
    data, begin = packed.tobytes(), 0
    while begin < len(data):
        begin += 8
        end = begin + struct.unpack_from("<Q", data, begin - 8)[0]
        yield data[begin:end].decode("utf-8")
        begin = end
