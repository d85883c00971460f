"""The protocol of resolvers, which find adapters, and the spellings of sources."""

from __future__ import annotations

import os
import re
from typing import Protocol, runtime_checkable

from ....core.errors import AdapterError, AdapterSourceError

DEFAULT_MAX_ADAPTER_BYTES = 4 << 30

HUB_SCHEME = "hf"
LOCAL_SCHEMES = ("file", "local")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB_ID = re.compile(rf"{_NAME}/{_NAME}(@[\w.-]+(/[\w.-]+)*)?", re.ASCII)
_MAX_SHOWN = 200


@runtime_checkable
class AdapterResolver(Protocol):
    """Finds adapters; plug-ins implement it. Worker threads call it, several at once; it may take long."""

    def resolve(self, name: str, source: str | None) -> str | os.PathLike[str] | None:
        """A local folder with the adapter's files, as PEFT writes them, which stays while the adapter is in use.

        Args:
            name: The adapter's name.
            source: Where the user says it is ("store://sql"); the answer then depends on it alone. None: a request
                named an adapter that is not loaded.

        Returns:
            None when this is nothing of this resolver's: the next one is asked.

        Raises:
            OutriderError: it is, and cannot be had. Other exceptions become an AdapterSourceError.
        """


def source_scheme(source: str) -> str | None:
    """ "s3" of "s3://bucket/x", "hf" of what is written as a hub id ("org/name", "org/name@revision"); None for a path.

    A folder of that name in the working directory makes "org/name" a path.
    """
    match = _SCHEME.match(source)
    if match is not None:
        return match[1].lower()
    return HUB_SCHEME if is_hub_id(source) and not os.path.exists(source) else None


def is_hub_id(text: str) -> bool:
    """True when a source is written as an id of the hub, maybe with a revision."""
    return _HUB_ID.fullmatch(text) is not None and ".." not in text


def local_path(source: str) -> str:
    """The path of a "file://" source, and "~" as the home folder; any other source as it is."""
    match = _SCHEME.match(source)
    path = source[match.end() :] if match is not None and match[1].lower() in LOCAL_SCHEMES else source
    return os.path.expanduser(path)


def shown_source(source: str) -> str:
    """A source for messages and model cards: bounded, without a password or a signed query."""
    if _SCHEME.match(source):
        source = re.sub(r"(?<=://)[^/@]*@", "", source.partition("?")[0])
    return source if len(source) <= _MAX_SHOWN else f"{source[: _MAX_SHOWN - 1]}…"


def no_adapter(message: str, field: str = "lora_path") -> AdapterError:
    """The error for a source that holds no adapter which could be served."""
    return AdapterError(message, param=field)


def unavailable(message: str) -> AdapterSourceError:
    """The error for a source that could not be reached; trying again later may help."""
    return AdapterSourceError(message, param="lora_path")


def valid_folder_name(name: str) -> bool:
    """True when a name may be that of a subfolder: one component of a path, not hidden, nothing that is not printed."""
    return bool(name) and len(name) <= 255 and not name.startswith(".") and name.isprintable() and "/" not in name
