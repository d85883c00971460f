"""Fields of a response's request, other than its input, as those of a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ....core.errors import InvalidRequestError, invalid
from ....core.sampling_params import quote_for_error
from ....core.text import shorten
from ...body.lenient import ignore
from ..protocol import ChatCompletionRequest
from .protocol import ResponsesRequest

_SAME = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop stop_token_ids "
    "min_tokens ignore_eos speculative structured_outputs chat_template_kwargs parallel_tool_calls"
).split()
"""Fields that a chat has too."""
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names in a chat's errors, and what they are called here."""
_IN_ERRORS = re.compile(r"\b(?:" + "|".join(_RENAMED) + r")\b|(?<=\])\.function(?=\.)")
_IN_TOOLS = re.compile(r"(?<=\btools\[)\d+(?=\])")
_OFFERED = re.compile(r"custom|image_generation|(?:local_)?shell|apply_patch|namespace|tool_search|web_search(?:_\w+)?")
"""Types of tools that coding agents write in addition to their functions, whether or not a server has them."""
_ENCRYPTED = "reasoning.encrypted_content"
"""Entry of `include` that asks for nothing here: reasoning is given as text, which may be sent back."""


def chat_request(body: ResponsesRequest, *, strict: bool) -> ChatCompletionRequest:
    """The request as a chat, without its messages.

    Args:
        strict: refuse what would be ignored.

    Raises:
        InvalidRequestError: a field asks for what is not served; `param` names it.
    """
    _check_include(body, strict)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    fields["max_tokens"] = body.max_output_tokens
    if body.tools:
        fields["tools"] = _functions(body.tools, strict)
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None and body.text.format:
        fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        for name in ("summary", "generate_summary"):
            _check_summary(name, getattr(body.reasoning, name), strict)
    if body.truncation == "auto":
        ignore("truncation", strict=strict)  # a conversation that is too long is refused
    given = {name: value for name, value in fields.items() if value is not None}
    return ChatCompletionRequest.model_construct(messages=[], **given)


def _check_include(body: ResponsesRequest, strict: bool) -> None:
    for index, entry in enumerate(body.include or ()):
        if entry != _ENCRYPTED:
            raise InvalidRequestError(f"include: {shorten(repr(entry))} is not supported", param=f"include[{index}]")
        ignore(f"include[{index}]", strict=strict)


def _check_summary(name: str, value: str | None, strict: bool) -> None:
    """Refuse summaries; "auto" may be none."""
    if value not in (None, "auto"):
        raise invalid(
            f"reasoning.{name}",
            f'must be "auto": reasoning is given as it is, and not summarised; got {quote_for_error(value)}',
        )
    if value is not None:
        ignore(f"reasoning.{name}", strict=strict)


def function_places(tools: list[Any] | None) -> list[int]:
    """Places of the functions among a request's tools: the chat has no others."""
    return [index for index, tool in enumerate(tools or ()) if _tool_type(tool) == "function"]


def _tool_type(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, dict) else None


def _functions(tools: list[Any], strict: bool) -> list[dict[str, Any]]:
    """Functions as a chat has them; `tools.choice` checks the rest. Other tools are ignored next to them if agents
    write them unasked."""
    places = function_places(tools)
    for index, kind in enumerate(map(_tool_type, tools)):
        if kind == "function":
            continue
        if not places or not isinstance(kind, str) or not _OFFERED.fullmatch(kind):
            raise InvalidRequestError(
                f"tools[{index}]: tools of type {shorten(repr(kind))} are not run by this server; only functions, "
                "which the client runs, are supported",
                param=f"tools[{index}].type",
            )
        ignore(f"tools[{index}]", strict=strict)
    return [
        {"type": "function", "function": {name: part for name, part in tools[index].items() if name != "type"}}
        for index in places
    ]


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """The choice as a chat has it, which takes a response's forms of objects too."""
    if isinstance(choice, str | None) or choice.get("type") == "allowed_tools":
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise invalid(
            "tool_choice",
            'must be "none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", ...}, '
            f"got {quote_for_error(choice)}",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _format(given: dict[str, Any]) -> dict[str, Any]:
    """`text.format` as a chat's `response_format`, in which the schema is one level deeper."""
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: part for name, part in given.items() if name != "type"}}


def in_own_names(error: InvalidRequestError, places: Sequence[int]) -> InvalidRequestError:
    """An error of the chat in this API's names. `places`: see `function_places`."""

    own_places = {str(index): str(place) for index, place in enumerate(places)}

    def own(text: str) -> str:  # which may quote the user's
        text = _IN_TOOLS.sub(lambda found: own_places.get(found[0], found[0]), text)
        return _IN_ERRORS.sub(lambda found: _RENAMED.get(found[0], ""), text)

    error.message = own(error.message.replace("json_schema.schema", "schema"))
    error.param = error.param and own(error.param)
    error.args = (error.message,)
    return error
