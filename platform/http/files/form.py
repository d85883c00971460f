"""Parser of an uploaded form: its file is written while it arrives, its other fields are short texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...core.errors import InvalidRequestError
from ...core.text import shorten

MAX_PARTS = 16
"""Parts of one form; OpenAI's clients send four at most."""
MAX_FIELD_BYTES = 1024
"""Bytes of a field that is not the file."""
MAX_HEADER_BYTES = 4096
"""Bytes of one part's headers."""
MAX_OVERHEAD = 64 << 10
"""Bytes of a whole form without its file: fields, headers, boundaries."""
MAX_FILENAME = 512
"""Characters of a file's name; longer ones are cut."""
_FILE = "file"


def parse_boundary(content_type: str) -> bytes:
    """Boundary of a form.

    Raises:
        InvalidRequestError: the body is no form.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:  # RFC 2046
        raise InvalidRequestError(
            f"Content-Type must be multipart/form-data with a boundary, got {shorten(content_type) or 'none'}"
        )
    return boundary


class Form:
    """One form. `feed` blocks: the file is written by it."""

    def __init__(
        self, boundary: bytes, write: Callable[[bytearray], None], documents: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`write` takes pieces of the file. `documents` are fields with longer texts, which are kept as they are, and
        their largest numbers of bytes."""
        self._documents = documents
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file; None until there is one."""
        self.is_complete = False
        self._write = write
        self._parts = 0
        self._name = ""
        self._headers: dict[bytes, bytes] = {}
        self._header = bytearray(), bytearray()
        self._header_bytes = 0
        self._content = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse the next piece of the body.

        Raises:
            InvalidRequestError: it is no form, or beyond the bounds.
            OutriderError: what `write` raises.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError(f"The body is not a valid form: {shorten(str(error))}") from None
        if self._name == _FILE and self._content:
            self._flush()

    def finish(self) -> str:
        """The file's name, at the end of the body.

        Raises:
            InvalidRequestError: the form has been cut, or has no file.
        """
        if not self.is_complete:
            raise InvalidRequestError("The form has no end: its closing boundary is missing")
        if self.filename is None:
            raise InvalidRequestError("Missing field: 'file'", param=_FILE)
        return self.filename

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequestError(f"The form has more than {MAX_PARTS} parts")
        self._headers, self._header_bytes = {}, 0

    def _on_header(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise InvalidRequestError(f"The headers of a part of the form are longer than {MAX_HEADER_BYTES} bytes")
        self._header[which].extend(data)

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = bytearray(), bytearray()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = _text(options.get(b"name", b""))
        if not self._name:
            raise InvalidRequestError("A part of the form has no name")
        if self._name != _FILE and self._name in self.fields:
            raise InvalidRequestError(f"{shorten(self._name)} is given twice", param=shorten(self._name))
        if self._name == _FILE:
            if self.filename is not None:
                raise InvalidRequestError("file is given twice", param=_FILE)
            self.filename = _text(options.get(b"filename", b""))[:MAX_FILENAME] or "upload"

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._content += memoryview(data)[start:end]
        most = self._documents.get(self._name, MAX_FIELD_BYTES)
        if self._name != _FILE and len(self._content) > most:
            name = shorten(self._name)
            raise InvalidRequestError(f"{name} is longer than {most} bytes", param=name)

    def _on_part_end(self) -> None:
        if self._name == _FILE:
            self._flush()
        elif self._name in self._documents:
            self.fields[self._name] = self._content.decode("utf-8", "replace")
        else:
            self.fields[self._name] = _text(bytes(self._content))
        self._content, self._name = bytearray(), ""

    def _on_end(self) -> None:
        self.is_complete = True

    def _flush(self) -> None:
        content, self._content = self._content, bytearray()
        self._write(content)


def _text(value: Any) -> str:
    """A text of the form, without characters that a terminal or a log would act on."""
    text = bytes(value).decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
