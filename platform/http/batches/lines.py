"""Lines of a batch's input -> requests, checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import msgspec

from ...core.errors import InvalidRequestError
from ...core.text import shorten
from ..body.bounds import MAX_VALUES, scan

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/classify",
    "/v1/responses",
    "/v1/messages",
)
"""Routes that a line may ask for."""
MAX_CUSTOM_ID = 512
"""Characters of a `custom_id`, which is copied into the answer."""
LINE_OVERHEAD = 8 << 10
"""Bytes of a line around its body."""
_SMALL = 64 << 10
"""Bytes of a line that is parsed within a millisecond, whatever is in it."""
_PIECE = 1 << 20
"""Bytes of a line that is too long, read and dropped in one go."""


class Line(NamedTuple):
    """A line of the input that is not empty."""

    number: int
    """From 1, as editors count."""
    content: bytes | None
    """None: it is longer than a line may be."""


class LineRequest(NamedTuple):
    """A request of a line."""

    custom_id: Any
    url: str
    body: bytes
    """JSON of an object, as it will be sent."""


class LineError(Exception):
    """A line is no request. `code` and `param` as in OpenAI's `errors`."""

    def __init__(self, message: str, code: str, param: str | None = None, custom_id: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.custom_id = custom_id


class CustomIds:
    """Set of the ids that occurred, 16 bytes for each."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, custom_id: str) -> bool:
        """Add an id; returns False if it is there already."""
        before = len(self._digests)
        self._digests.add(_digest(custom_id))
        return len(self._digests) > before

    def __contains__(self, custom_id: str) -> bool:
        return _digest(custom_id) in self._digests

    def __len__(self) -> int:
        return len(self._digests)


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def numbered(lines: IO[bytes], max_bytes: int, max_lines: int | None = None) -> Iterator[Line]:
    """Lines with their numbers, without empty ones. At most `max_bytes` of one are held.

    Raises:
        LineError: there are more than `max_lines`, empty ones too.
    """
    number = 0
    while line := lines.readline(max_bytes + 1):
        number += 1
        if number - 1 == max_lines:
            raise LineError(f"The file has more than {max_lines} lines, empty ones too", "too_many_tasks")
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := lines.readline(_PIECE)) and not rest.endswith(b"\n"):
                pass
            yield Line(number, None)
        elif line.strip():
            yield Line(number, line)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineParser:
    """Parser of one file's lines."""

    max_bytes: int
    """Length of a line."""
    max_values: int = MAX_VALUES
    """Values of a long line: see `bounds.scan`."""
    endpoint: str | None = None
    """The only `url` that is taken; None: all of `URLS`."""
    is_lenient: bool = False
    """Take all that Python's `json` reads, such as NaN: the route refuses it in the line's answer."""

    def parse(self, line: Line) -> LineRequest:
        """The request of a line.

        Raises:
            LineError: it is none.
        """
        if line.content is None:
            raise LineError(f"The line is longer than {self.max_bytes} bytes", "invalid_request")
        fields = _lenient_fields(line.content) if self.is_lenient else self._strict_fields(line.content)
        custom_id, url = fields.custom_id, fields.url
        if custom_id is None:
            raise _missing("custom_id", custom_id)
        if not isinstance(custom_id, str) or not custom_id:
            raise LineError("custom_id must be a string that is not empty", "invalid_value", "custom_id", custom_id)
        if len(custom_id) > MAX_CUSTOM_ID:
            message = f"custom_id is longer than {MAX_CUSTOM_ID} characters"
            raise LineError(message, "invalid_value", "custom_id", custom_id[:MAX_CUSTOM_ID])
        if fields.method != "POST":
            raise LineError("method must be POST", "invalid_method", "method", custom_id)
        if url is None:
            raise _missing("url", custom_id)
        urls = URLS if self.endpoint is None else (self.endpoint,)
        if url not in urls:
            either = f"must be one of {', '.join(URLS)}" if self.endpoint is None else f"must be {self.endpoint}"
            raise LineError(f"url {either}; got {shorten(repr(url))}", "invalid_url", "url", custom_id)
        if fields.body is None:
            raise _missing("body", custom_id)
        if not fields.body.startswith(b"{"):
            raise LineError("body must be an object", "invalid_value", "body", custom_id)
        if fields.streams:
            raise LineError("body.stream: a file has no streams", "invalid_value", "body.stream", custom_id)
        return LineRequest(custom_id, url, fields.body)

    def _strict_fields(self, content: bytes) -> _Fields:
        try:
            content.decode()
            if len(content) > _SMALL:
                for _ in scan(bytearray(content), self.max_values):
                    pass
            line = _ENVELOPE.decode(content)
            body = bytes(line.body)
            streams = body.startswith(b"{") and bytes(_BODY.decode(body).stream) == b"true"
            custom_id, method, url = map(_value, (line.custom_id, line.method, line.url))
        except UnicodeDecodeError:
            raise LineError("This line is not valid UTF-8", "invalid_json_line") from None
        except InvalidRequestError as error:
            raise LineError(f"This line {error.message}", "invalid_request") from None
        except RecursionError:
            raise LineError("This line is nested too deeply", "invalid_json_line") from None
        except msgspec.ValidationError:
            raise LineError("This line must be a JSON object", "invalid_json_line") from None
        except msgspec.DecodeError as error:
            message = f"This line is not valid JSON: {shorten(str(error))}"
            raise LineError(message, "invalid_json_line") from None
        return _Fields(custom_id, method, url, None if body in (b"", b"null") else body, streams)


class _Fields(NamedTuple):
    """Fields of a line; None: not given."""

    custom_id: Any
    method: Any
    url: Any
    body: bytes | None
    streams: bool


_NOTHING = msgspec.Raw(b"")


class _Envelope(msgspec.Struct):
    """A line, of which only the ends of values are looked for."""

    custom_id: msgspec.Raw = _NOTHING
    method: msgspec.Raw = msgspec.Raw(b'"POST"')
    url: msgspec.Raw = _NOTHING
    body: msgspec.Raw = _NOTHING


class _Body(msgspec.Struct):
    stream: msgspec.Raw = _NOTHING


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_BODY = msgspec.json.Decoder(_Body)


def _value(raw: msgspec.Raw) -> Any:
    """A value that should be a text: None if it is not given, the JSON of another value."""
    content = bytes(raw)
    if not content or content == b"null":
        return None
    return msgspec.json.decode(content) if content.startswith(b'"') else content[:MAX_CUSTOM_ID]


def _lenient_fields(content: bytes) -> _Fields:
    try:
        line = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not valid JSON: {shorten(str(error))}", "invalid_json_line") from error
    if not isinstance(line, dict):
        raise LineError("must be a JSON object", "invalid_json_line")
    body = line.get("body")
    streams = isinstance(body, dict) and bool(body.get("stream"))
    raw = None if body is None else json.dumps(body).encode()  # as ASCII: the route says what is wrong with it
    return _Fields(line.get("custom_id"), line.get("method", "POST"), line.get("url"), raw, streams)


def _missing(name: str, custom_id: Any) -> LineError:
    return LineError(f"Missing required parameter: '{name}'", "missing_required_parameter", name, custom_id)
