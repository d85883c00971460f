"""Errors about an adapter's files."""

from __future__ import annotations

from ...platform.core.errors import AdapterError
from ...platform.core.text import shorten


def adapter_error(message: str) -> AdapterError:
    """Return an AdapterError about an adapter's files."""
    return AdapterError(message, param="lora_path")


def quote_path(path: object) -> str:
    """Return a path for a message: quoted, so that it stays on one line, and of bounded length."""
    return repr(shorten(str(path)))
