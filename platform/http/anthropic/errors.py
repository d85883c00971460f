"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message", ...}}`."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"
"""Path of the routes whose errors have this form, with all paths below it."""
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


def is_of(path: str) -> bool:
    """True for a path whose errors have this form."""
    return path == PATH or path.startswith(f"{PATH}/")


def in_form(body: dict[str, Any], status: int) -> tuple[dict[str, Any], int]:
    """OpenAI's error in Anthropic's form, with its status; `param` and `code` stay."""
    error = body["error"]
    if error["type"] == "OverloadedError":
        status = OVERLOADED
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": error | {"type": kind}}, status
