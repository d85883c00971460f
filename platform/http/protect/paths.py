"""Paths and methods as clients write them: slashes too many, HEAD, routes of other servers that are not here yet."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

ASKED_METHOD = "outrider.method"
"""Key of a request's scope: the method as the client sent it, if another one is routed."""

_SLASHES = re.compile("//+")
_WITH_NAMES = "/v1/models/"
"""Routes with a model's name, which may be a path and have slashes of its own."""
_CONSOLE = "/console/"
"""Path that redirects to the page, whose links are relative."""

TO_COME = tuple(
    "/v1/responses/compact /v1/responses/input_tokens /v1/messages/batches /v1/complete /v1/audio /v1/images "
    "/v1/videos /v1/moderations /v1/uploads /v1/fine_tuning /v1/assistants /v1/threads "
    "/v1/vector_stores /v1/conversations /v1/containers /v1/evals /v1/realtime /pooling /invocations".split()
)
"""Routes of OpenAI's and vLLM's API, with all paths below them, that are answered with 501. A 404 would say to gateways
that the deployment is broken."""


def is_to_come(path: str) -> bool:
    """True for a route that clients may expect and that is not implemented."""
    return any(path == route or path.startswith(f"{route}/") for route in TO_COME)


class Paths:
    """Outermost layer of the application, around `request_log.Observer`. HEAD is routed as GET: the HTTP server leaves
    the answer's body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            path = _plain(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path}
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET", ASKED_METHOD: "HEAD"}
        await self._app(scope, receive, send)


def _plain(path: str) -> str:
    """A path without a slash at its end, and without two in a row."""
    if path == _CONSOLE:
        return path
    if not path.startswith(_WITH_NAMES):
        path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/"
