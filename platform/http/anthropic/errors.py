"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message", ...}}`."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

PATH = "/v1/messages"
"""Path of the routes whose errors have this form, with all paths below it."""
MODELS = "/v1/models"
"""Path that OpenAI's API has, too."""
VERSION_HEADER = b"anthropic-version"
OVERLOADED = 529
"""Status of a full queue, after which Anthropic's clients try again."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}


def is_anthropic(scope: Scope) -> bool:
    """True for a request of Anthropic's API: by its path, or if both APIs have the path, by the header that all of
    Anthropic's clients send."""
    path = scope["path"]
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return any(name == VERSION_HEADER for name, _ in scope["headers"])
    return bool(path == PATH or path.startswith(f"{PATH}/"))


def in_form(body: dict[str, Any], status: int) -> tuple[dict[str, Any], int]:
    """OpenAI's error in Anthropic's form, with its status; `param` and `code` stay."""
    error = body["error"]
    if error["type"] == "OverloadedError":
        status = OVERLOADED
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": error | {"type": kind}}, status
