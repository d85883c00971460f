"""Tools of a request: which there are, and whether one must be called."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from ....core.errors import InvalidRequestError, invalid
from ....core.sampling_params import shown
from ....core.structured_outputs import StructuredOutputsParams

MAX_TOOLS = 512
"""Most tools of a request. OpenAI's API takes 128; agents with several MCP servers send more to Anthropic's."""
MAX_NAME = 128
"""Most characters of a tool's name, as in Anthropic's API: agents write the name of an MCP server before it."""
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}", re.ASCII)


class ToolFields(Protocol):
    """Fields of a request."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


class ToolChoice(NamedTuple):
    """Tools of a request, checked."""

    tools: tuple[dict[str, Any], ...] = ()
    """Each {"type": "function", "function": {"name", ...}}; none where no tool may be called."""
    is_forced: bool = False
    """True: the answer is a call, or several."""
    name: str | None = None
    """Name of the one tool that must be called."""
    parallel: bool = True
    """False: an answer has at most one call."""

    @property
    def has_strict(self) -> bool:
        """True when the arguments of some tool must fit its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)

    def constraint(self, source: str = "tools") -> StructuredOutputsParams | None:
        """Form of a forced answer: the arguments of the one tool, or a list of calls; None where nothing is forced."""
        if not self.is_forced:
            return None
        if self.name is not None:
            function = next(tool["function"] for tool in self.tools if tool["function"]["name"] == self.name)
            return StructuredOutputsParams(json=parameters_of(function), source=source)
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": moved(
                        parameters_of(tool["function"]), f"#/items/anyOf/{index}/properties/parameters"
                    ),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for index, tool in enumerate(self.tools)
        ]
        schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if not self.parallel:
            schema["maxItems"] = 1
        return StructuredOutputsParams(json=schema, source=source)


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of a tool's arguments."""
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def moved(schema: Any, place: str) -> Any:
    """A schema for `place` in another one: its references to itself and to its own definitions begin there."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else moved(value, place)
        for key, value in schema.items()
    }


def tool_choice_of(body: ToolFields) -> ToolChoice:
    """Tools of a request.

    Raises:
        InvalidRequestError: a tool or the choice is wrong; `param` names the place.
    """
    tools, choice = body.tools or [], body.tool_choice
    name = _name_of(choice)
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    names = [_checked(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise invalid("tools", f"has two functions called {twice!r}")
    if choice == "none":
        return ToolChoice()
    is_forced = choice == "required" or name is not None
    if is_forced and not tools:
        raise invalid("tool_choice", "needs tools")
    if name is not None and name not in names:
        raise InvalidRequestError(f"tool_choice: there is no tool called {shown(name)}", param="tool_choice")
    return ToolChoice(tuple(tools), is_forced, name, body.parallel_tool_calls is not False)


def _name_of(choice: Any) -> str | None:
    """Name in a `tool_choice` that is an object."""
    if choice in (None, "none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise invalid(
            "tool_choice",
            f'must be "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}, got '
            f"{shown(choice)}",
        )
    return name


_TYPES = (("parameters", dict, "a JSON schema"), ("description", str, "a string"), ("strict", bool, "a boolean"))
"""Optional fields of a function, and their types."""


def _checked(tool: Any, place: str) -> str:
    """Name of a tool."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise invalid(place, 'must be {"type": "function", "function": {...}}')
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"{place}.function.name",
            f"must have 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, _, - and .; got {shown(name)}",
        )
    for field, kind, what in _TYPES:
        if not isinstance(function.get(field), kind | None):
            param = f"{place}.function.{field}"
            raise invalid(param, f"must be {what}")
    return name
