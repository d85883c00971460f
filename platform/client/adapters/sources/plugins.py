"""Resolvers that others write: named on the command line, or installed with an entry point."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from ....core.errors import InvalidRequestError
from .resolver import AdapterResolver

logger = logging.getLogger(__name__)

ENTRY_POINTS = "outrider.lora_resolvers"
"""The group of entry points; each is a callable without parameters that returns an `AdapterResolver`."""


def load_plugin(path: str) -> AdapterResolver:
    """The resolver that "package.module:factory" makes.

    Raises:
        InvalidRequestError: it cannot be imported, or makes no resolver.
    """
    try:
        module, _, name = path.partition(":")
        if not module or not name:
            raise ValueError("must be package.module:factory")
        return _made(resolve_name(path))
    except Exception as error:  # whatever a plug-in does when it is imported
        raise InvalidRequestError(f"{path!r}: {type(error).__name__}: {error}", param="lora_resolver") from error


def _made(factory: Callable[[], Any]) -> AdapterResolver:
    resolver = factory()
    if not isinstance(resolver, AdapterResolver):
        raise TypeError(f"{type(resolver).__name__} has no method resolve")
    return resolver


@functools.cache
def installed_plugins() -> tuple[AdapterResolver, ...]:
    """The resolvers with an entry point; one that cannot be loaded is logged and left out."""
    found = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found.append(_made(entry.load()))
        except Exception:
            logger.exception("the adapter resolver %s cannot be loaded", entry.value)
    return tuple(found)
