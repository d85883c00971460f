"""Log lines of a server's processes: plain text, or one JSON object a line.

They contain no text of a prompt or an answer, unless the operator asks for it: while a request is being answered, an
exception's own message, which may quote it, is left out of the traceback.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, TypeAlias

from .adapter_names import label_text
from .errors import OutriderError

LogFormat: TypeAlias = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")

REQUEST_LOGGER = "outrider.requests"
"""Logger of the line that each request gets."""

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
"""Id of the HTTP request that is being handled; "" outside of one."""

_in_use: LogFormat = "text"
_with_prompts = False


def set_up_logging(level: int | str, log_format: LogFormat, process: str, *, prompts: bool = False) -> None:
    """Make the root logger write to standard error. Once a process.

    Args:
        process: Named in every JSON line: "api" or "engine".
        prompts: Texts of prompts and answers may be written.
    """
    global _in_use, _with_prompts
    _in_use, _with_prompts = log_format, prompts
    handler = logging.StreamHandler()
    handler.setFormatter(json_formatter(process) if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(log_format == "json")  # else they would be mixed with the objects


def format_in_use() -> LogFormat:
    """The format given to the last call of `set_up_logging`."""
    return _in_use


def format_trace(error: BaseException | None) -> str:
    """Traceback of an exception with the classes of it and its causes. Their messages are left out, except those of
    `OutriderError`."""
    if error is None:
        return ""
    lines = traceback.format_tb(error.__traceback__)
    while error is not None:
        message = f": {error.message}" if isinstance(error, OutriderError) else ""
        lines.append(f"{type(error).__name__}{message}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        lines += ["\n  because of "] if error is not None else []
    return "".join(lines)


_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def _shown_exception(formatter: logging.Formatter, info: _ExcInfo) -> str:
    if current_request_id.get() and not _with_prompts:
        return format_trace(info[1])
    return logging.Formatter.formatException(formatter, info)


class TextFormatter(logging.Formatter):
    """One record a line, with its fields after the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter. A traceback that another formatter has left in the record is not ours."""
        record.exc_text = None
        try:
            return super().format(record)
        finally:
            record.exc_text = None

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        fields = extra_fields(record)
        text = label_text(super().formatMessage(record))
        return " ".join([text, *(f"{name}={_shown(value)}" for name, value in fields.items())])

    def formatException(self, ei: _ExcInfo) -> str:
        """See logging.Formatter."""
        return label_text(_shown_exception(self, ei))


def json_formatter(process: str) -> logging.Formatter:
    """One JSON object a line: `time`, `level`, `logger`, `process`, `message`, the call's `extra`, `request_id` while a
    request is being answered, and `exc_info`."""
    from pythonjsonlogger.core import RESERVED_ATTRS
    from pythonjsonlogger.json import JsonFormatter

    standard = {*RESERVED_ATTRS, "fields"}

    class Formatter(JsonFormatter):
        """JSON formatter with the fields of this project."""

        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            """See BaseJsonFormatter."""
            log_data |= {
                "time": self.formatTime(record),
                "level": record.levelname,
                "logger": record.name,
                "process": process,
                "message": label_text(record.message),
                **{name: value for name, value in record.__dict__.items() if name not in standard},
                **extra_fields(record),
                **message_dict,
            }
            request_id = current_request_id.get()
            if request_id:
                log_data.setdefault("request_id", request_id)

        def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
            """Time of a record as RFC 3339, in UTC."""
            seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            return f"{seconds}.{int(record.msecs):03d}Z"

        def formatException(self, ei: _ExcInfo) -> str:
            """See logging.Formatter."""
            return label_text(_shown_exception(self, ei))

    return Formatter(json_default=str)


def with_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` of a logging call: named values in addition to the message."""
    return {"fields": dict(fields)}


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Fields of a record that were given with `with_fields`."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _shown(value: object) -> str:
    """A value on a line of text: an ambiguous one is quoted."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = bool(text) and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain or not isinstance(value, str) else json.dumps(text)
