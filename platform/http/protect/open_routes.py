"""Routes that answer without a key. Every other path needs one: a route that is added without an entry here is closed,
and so is a path that no route has."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import Scope

OPEN_PATHS = frozenset(
    (
        *("/health", "/ping", "/load", "/version"),
        "/metrics",  # with tenants the route itself asks for an admin's key
        *("/", "/openapi.json", "/console", "/console/"),  # no data of anybody
    )
)
"""Paths of open routes."""
OPEN_FOLDERS = ("/console/assets/",)
"""Prefixes of open routes: the files of the console's page."""


def is_open(scope: Scope) -> bool:
    """True for a request to an open route, by the path that the router will see."""
    path = get_route_path(scope)
    return scope["type"] == "http" and (path in OPEN_PATHS or path.startswith(OPEN_FOLDERS))
