"""Error answers of the HTTP API, checked for their form."""

from typing import Any


def error_in(response: Any, status: int = 400) -> dict[str, Any]:
    """The error of an answer, which must have this status and OpenAI's form."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
