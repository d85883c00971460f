"""Tools of a request: which there are, and whether one must be called."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from ....core.errors import InvalidRequestError, invalid
from ....core.sampling_params import quote_for_error
from ....core.structured_outputs import StructuredOutputsParams
from ...body.lenient import ignore

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
    """Each {"type": "function", "function": {"name", ...}}; none if no tool may be called."""
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
        """Form of a forced answer: the arguments of the one tool, or a list of calls; None if nothing is forced."""
        if not self.is_forced:
            return None
        if self.name is not None:
            function = next(tool["function"] for tool in self.tools if tool["function"]["name"] == self.name)
            return StructuredOutputsParams(json=tool_parameters(function), source=source)
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": moved(
                        tool_parameters(tool["function"]), f"#/items/anyOf/{index}/properties/parameters"
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
        return StructuredOutputsParams(json=schema, source=source, disable_any_whitespace=True, ends_list=self.parallel)


def tool_parameters(function: dict[str, Any]) -> dict[str, Any]:
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


def parse_tool_choice(body: ToolFields, *, strict: bool = False) -> ToolChoice:
    """Tools of a request. A forced answer has one call unless `parallel_tool_calls` is true: in a list a model may go
    on with calls that it was not asked for.

    Args:
        strict: Refuse tools that would be ignored.

    Raises:
        InvalidRequestError: a tool or the choice is wrong; `param` names it.
    """
    tools = _functions(body.tools or [], strict=strict)
    choice, allowed = _allowed(body.tool_choice)
    name = _chosen_name(choice)
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    names = [_checked(tool, f"tools[{index}]") for index, tool in tools.items()]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise invalid("tools", f"has two functions called {twice!r}")
    if choice == "none":
        return ToolChoice()
    is_forced = choice == "required" or name is not None
    if is_forced and not tools:
        raise invalid("tool_choice", "needs tools")
    wanted = [name] if name is not None else allowed
    unknown = next((each for each in wanted or () if each not in names), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"tool_choice: there is no tool called {quote_for_error(unknown)}", param="tool_choice"
        )
    offered = tuple(tool for tool in tools.values() if allowed is None or tool["function"]["name"] in allowed)
    is_parallel = body.parallel_tool_calls is not False
    if choice == "required" and body.parallel_tool_calls is None:
        is_parallel = False
    if choice == "required" and not is_parallel and len(offered) == 1:
        name = offered[0]["function"]["name"]  # its arguments are the whole answer
    return ToolChoice(offered, is_forced, name, is_parallel)


def _functions(tools: list[Any], *, strict: bool) -> dict[int, Any]:
    """Tools by their index, without those of the type `custom`, which are ignored if there are others."""
    found = {index: tool for index, tool in enumerate(tools) if not _is_custom(tool)}
    if not found and tools:
        raise invalid("tools[0]", "is a custom tool, which is not supported: only functions are")
    for index in sorted(set(range(len(tools))) - found.keys()):
        ignore(f"tools[{index}]", strict=strict)
    return found


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "custom"


_ALIASES = {"any": "required"}
"""Other words for a choice: Mistral's and Anthropic's."""


def _allowed(choice: Any) -> tuple[Any, list[str] | None]:
    """The choice without `allowed_tools`, and the names of those tools; None: all of them. The list is in an object of
    its own in a chat, and next to the type in a response.

    Raises:
        InvalidRequestError: it is not of that form.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return _ALIASES.get(choice, choice) if isinstance(choice, str) else choice, None
    given = choice.get("allowed_tools", choice)
    mode = given.get("mode", "auto") if isinstance(given, dict) else None
    tools = given.get("tools") if isinstance(given, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid(
            "tool_choice",
            'must be {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}, got '
            f"{quote_for_error(choice)}",
        )
    names = [_named(tool) for tool in tools if not isinstance(tool, dict) or tool.get("type") == "function"]
    if not names or not all(isinstance(name, str) for name in names):
        raise invalid("tool_choice", f"must name functions in allowed_tools, got {quote_for_error(tools)}")
    return mode, [name for name in names if isinstance(name, str)]


def _named(choice: Any) -> Any:
    """Name of the function in an entry, {"type": "function", "function": {"name"}} or {"type": "function", "name"}."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)
    return function.get("name") if isinstance(function, dict) else None


def _chosen_name(choice: Any) -> str | None:
    """Name in a `tool_choice` that is an object."""
    if choice in (None, "none", "auto", "required"):
        return None
    name = _named(choice)
    if not isinstance(name, str):
        raise invalid(
            "tool_choice",
            'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": '
            f'"allowed_tools", ...}}, got {quote_for_error(choice)}',
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
            f"must have 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, _, - and .; got {quote_for_error(name)}",
        )
    for field, kind, what in _TYPES:
        if not isinstance(function.get(field), kind | None):
            param = f"{place}.function.{field}"
            raise invalid(param, f"must be {what}")
    return name
