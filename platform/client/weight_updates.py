"""Weight updates of a client: their sources, and those that an engine needs that is started again."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.errors import invalid
from ..core.weight_source import WeightSource

MAX_SOURCES = 1024
"""Most files of one update."""
MAX_VERSION = 256
"""Most characters of a version."""


class AppliedUpdate(NamedTuple):
    """Arguments of `Engine.update_weights`."""

    sources: list[WeightSource]
    draft: bool

    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {"sources": self.sources, "draft": self.draft}


class WeightUpdates:
    """The updates since the engine was made, as far as others have not replaced them."""

    def __init__(self) -> None:
        self.applied: list[AppliedUpdate] = []
        self.version = "default"
        """Label of the weights: that of the last update."""

    def add(self, update: AppliedUpdate, *, is_whole: bool, version: str | None) -> None:
        """Record an update that the engine has made. One of all weights replaces those before it, and any one replaces
        an earlier one from the same files."""
        self.applied = [
            before
            for before in self.applied
            if before.draft != update.draft or not (is_whole or before.sources == update.sources)
        ]
        self.applied.append(update)
        self.version = self.version if version is None else version


def weight_sources(path: str | None, shared_memory: str | None) -> list[WeightSource]:
    """The sources of an update; InvalidRequestError if not one of the two is given."""
    source = WeightSource(str(path or ""), shared_memory or "")
    source.check()
    return [source]


def check_version(version: str | None) -> None:
    """Raise InvalidRequestError for a label that is too long."""
    if version is not None and not (isinstance(version, str) and len(version) <= MAX_VERSION):
        raise invalid("weight_version", f"must be a text of at most {MAX_VERSION} characters")
