"""`functions` and `function_call`, the form that `tools` and `tool_choice` had before: taken as tools, and answered in
the old form."""

from __future__ import annotations

from typing import Any, Protocol

from ....core.errors import InvalidRequestError, invalid
from ....core.sampling_params import quote_for_error
from .choice import ToolFields


class FunctionFields(ToolFields, Protocol):
    """Fields of a request."""

    functions: list[dict[str, Any]] | None
    function_call: str | dict[str, Any] | None


def take_functions(body: FunctionFields) -> bool:
    """Write a request's functions as its tools, of which an answer calls one at most. True: the old form is requested.

    Raises:
        InvalidRequestError: there are tools too, or `function_call` is wrong.
    """
    call = body.function_call
    if not body.functions:
        if call not in (None, "none", "auto"):
            raise invalid("function_call", "needs functions")
        return False
    if body.tools or body.tool_choice is not None:
        raise InvalidRequestError("functions and tools exclude each other", param="functions")
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        body.tool_choice = {"type": "function", "function": {"name": call["name"]}}
    elif call in (None, "none", "auto"):
        body.tool_choice = call
    else:
        raise invalid("function_call", f'must be "none", "auto" or {{"name": ...}}, got {quote_for_error(call)}')
    body.tools = [{"type": "function", "function": function} for function in body.functions]
    body.parallel_tool_calls = False
    return True


def in_old_form(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a message, or of its delta, with `function_call` in place of `tool_calls`."""
    if "tool_calls" not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name != "tool_calls"}
    return rest | {"function_call": fields["tool_calls"][0]["function"]}


def old_reason(reason: str | None) -> str | None:
    """Finish reason in the old form."""
    return "function_call" if reason == "tool_calls" else reason


OLD_NAMES = {"tools": "functions", ".function": "", "tool_choice": "function_call"}
"""Names in errors, and what they are called in the old form."""
