"""Chat messages to the text that the model's chat template makes of them.

Templates read a message's content as a string or as a list of parts; a probe finds out which. Each template is given
the form that it reads, whichever the client sent, and a text that does not arrive in the prompt is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypedDict, cast

from ...core.compat.unsupported_options import reject_unsupported_options
from ...core.compat.vllm_python import CHAT
from ...core.errors import InvalidRequestError, invalid
from .deadline import DeadlineError, deadline
from .template_checks import check_texts_arrive, check_tools_are_listed, check_tools_arrive, missing_tools
from .template_memory import TemplateMemoryError, template_memory

TEMPLATE_SECONDS = 10.0
"""Longest time of a template, which may be an adapter's: a program of a third party. A conversation that fills a long
context takes less than one second."""
_PROBE = "zqprobezq"
"""A text that no template contains."""
_A_AS_PARTS = [{"type": "text", "text": "a"}]
_PAD = "\t \t"
"""White space after the text to be continued; if it is gone, the template trims the end of messages."""


_NULL_CONTENT = (
    "{%- set null_content = namespace(messages=[]) %}{%- for message in messages %}{%- set null_content.messages = "
    "null_content.messages + [message if 'content' in message else dict(message, content=none)] %}{%- endfor %}"
    "{%- set messages = null_content.messages %}"
)
"""Begin of a template that asks whether a content is null: transformers leaves out what is null."""


class ChatOptions(TypedDict, total=False):
    """Options for rendering messages as a prompt."""

    chat_template: str | None
    """Instead of the model's own."""
    add_generation_prompt: bool
    """Append what begins the assistant's turn (default True)."""
    continue_final_message: bool
    """Leave the last message open, to be continued; not together with `add_generation_prompt`."""
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    """Further variables of the template."""


TAKEN_VARIABLES = frozenset({*ChatOptions.__annotations__, "conversation", "tokenize", "messages"})
"""Names that `chat_template_kwargs` cannot have."""


def render_messages(tokenizer: Any, messages: Sequence[dict[str, Any]], options: ChatOptions) -> str:
    """Apply the chat template.

    Raises:
        InvalidRequestError: the messages are malformed, there is no template, or the template refuses them.
    """
    reject_unsupported_options(
        "chat()", cast(dict[str, Any], options := options.copy()), CHAT, ChatOptions.__annotations__
    )
    add_generation_prompt = options.get("add_generation_prompt", True)
    continue_final_message = options.get("continue_final_message", False)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    template = options.get("chat_template")
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        raise InvalidRequestError(
            "the model has no chat template: give chat_template, or start the server with --chat-template FILE",
            param="chat_template",
        )
    conversation = [_message(index, message) for index, message in enumerate(_as_messages(messages))]
    extra = dict(options.get("chat_template_kwargs") or {})
    clash = sorted(TAKEN_VARIABLES & set(extra))
    if clash:
        raise invalid("chat_template_kwargs", f"must not contain {clash[0]!r}")
    tools = options.get("tools")
    try:
        resolve = getattr(tokenizer, "get_chat_template", None)
        if resolve is not None:  # one of several by its name, or the one for tools
            template = resolve(template, tools)

        def render(conversation: list[dict[str, Any]], tools: Any) -> str:
            return _apply(
                tokenizer,
                _in_form(tokenizer, template, conversation),
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=False,
                **extra,
            )

        def render_open(conversation: list[dict[str, Any]], tools: Any) -> str:
            one = partial(render, tools=tools)
            return _render_open(one, conversation) if continue_final_message else one(conversation)

        def checked(conversation: list[dict[str, Any]], tools: Any) -> str:
            one = partial(render, tools=tools)
            missing = [] if continue_final_message else missing_tools(conversation, one)
            text = render_open(conversation, tools)
            check_texts_arrive(conversation, text)
            check_tools_are_listed(tools or (), text, lambda tools: render_open(conversation, tools or None))
            check_tools_arrive(conversation, missing, text, one)
            return text

        with deadline(TEMPLATE_SECONDS):
            return _render_with_fallbacks(checked, conversation, tools)
    except InvalidRequestError:
        raise
    except (DeadlineError, TemplateMemoryError) as error:
        limit = f"takes longer than {TEMPLATE_SECONDS:g} s" if isinstance(error, DeadlineError) else str(error)
        raise InvalidRequestError(f"the chat template {limit} for these messages", param="messages") from error
    except Exception as error:  # templates are programs of the model or the user: they raise anything
        raise InvalidRequestError(f"the chat template refuses the messages: {error}", param="messages") from error


def _apply(tokenizer: Any, messages: list[dict[str, Any]], chat_template: str | None, **options: Any) -> str:
    """Apply the template of transformers, in bounded memory."""
    if chat_template is not None and any(message["content"] is None for message in messages):
        chat_template = _NULL_CONTENT + chat_template
    options["chat_template"] = chat_template
    with template_memory():
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text


# --- the form that a template reads -----------------------------------------------------------------------------------


def _in_form(tokenizer: Any, template: str | None, conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, each with its content and its calls' arguments in the form that the template reads."""
    result = []
    for message in conversation:
        if not _reads_parts(tokenizer, template, message["role"]):
            message = {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if message.get("tool_calls"):
            result += _with_calls(message, _calls_form(tokenizer, template))
        else:
            result.append(message)
    return result


class _CallsForm(NamedTuple):
    """Form in which a template reads an assistant's message with calls."""

    content: str
    """Content next to which it writes calls: "any", "empty", or "null" (DeepSeek's templates)."""
    as_text: bool
    """It reads the arguments as JSON text, and not as an object."""


def _with_calls(message: dict[str, Any], form: _CallsForm) -> list[dict[str, Any]]:
    """The message in the form that the template reads. Content that it would write in place of the calls is a message
    before them."""
    write = _with_arguments_as_text if form.as_text else _with_an_object
    called = {**message, "tool_calls": [write(call) for call in message["tool_calls"]]}
    if form.content == "any":
        return [called]
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if form.content == "null":
        called["content"] = None
    elif text:
        called["content"] = "" if isinstance(content, str) else [{"type": "text", "text": ""}]
    if not text:
        return [called]
    before = {name: value for name, value in message.items() if name != "tool_calls"}
    return [before, {name: value for name, value in called.items() if name != "reasoning_content"}]


def _with_arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_an_object(call: dict[str, Any]) -> dict[str, Any]:
    """The call, without a text in place of its arguments: a template that reads an object may fail on it."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": {}}} if isinstance(function["arguments"], str) else call


@lru_cache(maxsize=64)
def _calls_form(tokenizer: Any, template: str | None) -> _CallsForm:
    """The form in which a probing call's arguments arrive in the template's text."""
    function: dict[str, Any] = {"name": "f", "arguments": {"a": _PROBE}}
    call = {"id": "zqcallid9", "type": "function", "function": function}
    content: Any = _A_AS_PARTS if _reads_parts(tokenizer, template, "assistant") else "a"
    empty: Any = [{"type": "text", "text": ""}] if isinstance(content, list) else ""

    def arrives(form: _CallsForm) -> bool:
        given = {"role": "assistant", "content": content if form.content == "any" else empty, "tool_calls": [call]}
        result = {"role": "tool", "content": "b", "tool_call_id": "zqcallid9"}
        messages = [_probing_user(tokenizer, template), *_with_calls(given, form), result]
        text = _render_probe(tokenizer, template, messages)
        return _PROBE in text.replace(f"'{_PROBE}'", "")  # an object printed as it is is no JSON

    forms = [_CallsForm(kind, as_text) for kind in ("any", "empty", "null") for as_text in (False, True)]
    return next((form for form in forms if arrives(form)), forms[0])


@lru_cache(maxsize=64)
def _reads_parts(tokenizer: Any, template: str | None, role: str) -> bool:
    """True when the template reads the content of this role's messages as a list of parts, and not as a string."""

    def arrives(content: object) -> bool:
        probe: dict[str, Any] = {"role": role, "content": content}
        messages = [probe]
        if role != "user":
            user = _probing_user(tokenizer, template)
            messages = [probe, user] if role in ("system", "developer") else [user, probe, user]
        text = _render_probe(tokenizer, template, messages)
        as_data = f"{_PROBE}'}}" in text or f'{_PROBE}"}}' in text  # the list was printed as it is
        return _PROBE in text.casefold() and not as_data

    if arrives(_PROBE):
        return False
    if arrives([{"type": "text", "text": _PROBE}]):
        return True
    return role != "user" and _reads_parts(tokenizer, template, "user")


def _probing_user(tokenizer: Any, template: str | None) -> dict[str, Any]:
    return {"role": "user", "content": _A_AS_PARTS if _reads_parts(tokenizer, template, "user") else "a"}


def _render_probe(tokenizer: Any, template: str | None, messages: list[dict[str, Any]]) -> str:
    """The template's text of the messages, after a system's if it refuses them without; "" if it refuses all."""
    systems = [{"role": "system", "content": content} for content in ("a", _A_AS_PARTS)]
    for before in ([], *([system] for system in systems)):
        try:
            text = _apply(tokenizer, [*before, *messages], chat_template=template, add_generation_prompt=False)
        except Exception:  # whatever templates raise
            continue
        return text
    return ""


# --- messages in a form that the template refuses ---------------------------------------------------------------------


def _render_with_fallbacks(
    render: Callable[[list[dict[str, Any]], Any], str], conversation: list[dict[str, Any]], tools: Any
) -> str:
    """The text of the conversation. Some templates want ids of calls to be 9 letters or digits; many take one system
    message, at the start, and want users and assistants to take turns, while agents send several of each; others
    want a tool to have a description and parameters. What is refused is tried with such ids, then with neighbours of
    one role as one message, and then with all system messages at the start, each with complete tools too. The error
    is that of the conversation as it is."""
    try:
        return render(conversation, tools)
    except Exception:
        given = [_with_short_ids(message) for message in conversation]
        systems_first = sorted(given, key=lambda message: message["role"] not in ("system", "developer"))
        complete = [_complete(tool) for tool in tools or ()] or None
        tried = [(conversation, tools)]
        for other in (given, _merged(given), _merged(systems_first)):
            for way in ((other, tools), (other, complete)):
                with contextlib.suppress(Exception):  # whatever templates raise
                    if way not in tried and other[-1]["role"] == conversation[-1]["role"]:
                        tried.append(way)
                        return render(*way)
        raise


def _complete(tool: Any) -> Any:
    """A tool with all that OpenAI's API lets be left out."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    given = function.get("parameters")
    parameters = {"type": "object", "properties": {}, **(given if isinstance(given, dict) else {})}
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": parameters},
    }


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with an id of 9 characters for each id of a call."""
    result = dict(message)
    if "tool_call_id" in message:
        result["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if "id" in call else call for call in message["tool_calls"]
        ]
    return result


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    return text if re.fullmatch("[A-Za-z0-9]{9}", text) else hashlib.sha256(ascii(text).encode()).hexdigest()[:9]


def _merged(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with neighbours of one role as one message, if they have nothing but content."""
    result: list[dict[str, Any]] = []
    for message in conversation:
        before = result[-1] if result else {}
        if before.get("role") == message["role"] and before.keys() == message.keys() == {"role", "content"}:
            texts = ("\n".join(part["text"] for part in each["content"]) for each in (before, message))
            result[-1] = {**message, "content": [{"type": "text", "text": "\n\n".join(texts)}]}
        else:
            result.append(message)
    return result


# --- messages that are continued --------------------------------------------------------------------------------------


def _render_open(render: Callable[[list[dict[str, Any]]], str], conversation: list[dict[str, Any]]) -> str:
    """The conversation up to the end of its last message's text, with all that the template writes before it."""
    *before, last = conversation
    mark = uuid.uuid4().hex
    *parts, final = last["content"]

    def head_of(text: str) -> tuple[str, str]:
        marked = {**last, "content": [*parts, {**final, "text": text}]}
        head, found, tail = render([*before, marked]).rpartition(mark)
        if not found:
            raise InvalidRequestError(
                "the chat template leaves out the final message, which therefore cannot be continued",
                param=f"messages[{len(before)}].content",
            )
        return head, tail

    text: str = final["text"]
    head, tail = head_of(text + mark + _PAD)
    if tail.startswith(_PAD) or text == text.rstrip():
        return head
    return head_of(text.rstrip() + mark)[0]  # the template trims messages: so is this one


# --- messages as users give them --------------------------------------------------------------------------------------


def _as_messages(messages: object) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise invalid("messages", "must be a non-empty list")
    return list(messages)


def _message(index: int, message: object) -> dict[str, Any]:
    """One message in one form: content as a list of text parts, a tool call's arguments an object, or the text that a
    model has written in place of one: its client sends it back with every further message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] must be an object with a role", param="messages")
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise InvalidRequestError(f"messages[{index}] has no content", param="messages")
    result = {**message, "content": _content(index, message.get("content"))}
    if calls:
        result["tool_calls"] = [_tool_call(index, call) for call in calls]
    return result


def _content(index: int, content: object) -> list[dict[str, str]]:
    """The text parts, at least one."""
    if content is None or content == []:
        content = ""
    parts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"messages[{index}].content: only text parts are supported, got {kind!r}", param="messages"
            )
        parts.append({"type": "text", "text": text})
    return parts


def _tool_call(index: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequestError(f"messages[{index}].tool_calls: each needs a function", param="messages")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}", strict=False)
    if not isinstance(arguments, str | dict) or not arguments:
        arguments = {}  # null, a list, a number: no function has such arguments
    return {**call, "function": {**function, "arguments": arguments}}
