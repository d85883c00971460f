"""Chat messages to the text that the model's chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

from ..core.errors import InvalidRequestError

_WORD = re.compile(r"[A-Za-z0-9]+", re.ASCII)
_SEARCHED = 1000
"""Characters of a tool's result in which a word is looked for."""

_Render = Callable[[list[dict[str, Any]]], str]


class ChatOptions(TypedDict, total=False):
    """How messages become a prompt."""

    chat_template: str | None
    """Instead of the model's own."""
    add_generation_prompt: bool
    """Append what begins the assistant's turn (default True)."""
    continue_final_message: bool
    """Leave the last message open, to be continued; not together with `add_generation_prompt`."""
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    """Further variables of the template."""


def render_messages(tokenizer: Any, messages: Sequence[dict[str, Any]], options: ChatOptions) -> str:
    """Apply the chat template.

    Raises:
        InvalidRequestError: the messages are malformed, there is no template, or the template refuses them.
    """
    unknown = sorted(set(options) - set(ChatOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown chat option {unknown[0]!r}; known are {', '.join(ChatOptions.__annotations__)}")
    add_generation_prompt = options.get("add_generation_prompt", True)
    continue_final_message = options.get("continue_final_message", False)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    template = options.get("chat_template")
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        raise InvalidRequestError("the model has no chat template; give chat_template", param="chat_template")
    conversation = [_message(index, message) for index, message in enumerate(_as_messages(messages))]
    extra = dict(options.get("chat_template_kwargs") or {})
    clash = sorted({*ChatOptions.__annotations__, "conversation", "tokenize", "messages"} & set(extra))
    if clash:
        raise InvalidRequestError(f"chat_template_kwargs must not contain {clash[0]!r}", param="chat_template_kwargs")

    def render(conversation: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            conversation,
            tools=options.get("tools"),
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **extra,
        )

    try:
        text = render(conversation)
    except Exception as error:  # templates are programs of the model or the user: they raise anything
        raise InvalidRequestError(f"the chat template refuses the messages: {error}", param="messages") from error
    _check_tools_arrive(conversation, text, render)
    return text


def _check_tools_arrive(conversation: list[dict[str, Any]], text: str, render: _Render) -> None:
    """Refuse a conversation whose tool calls or results the template leaves out. Those are looked at more closely of
    which a name or word does not stand in the text, in order: without them the text must be another."""
    position = 0
    for index, message in enumerate(conversation):
        for place, word, without in _tool_words(index, message):
            position = text.find(word, position) + len(word)
            if position >= len(word):
                continue
            if _renders_to(text, render, [*conversation[:index], without, *conversation[index + 1 :]]):
                raise InvalidRequestError(
                    f"{place}: the model's chat template leaves tool calls or their results out", param=place
                )
            return


def _tool_words(index: int, message: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place and a word of each tool call or result of a message, and the message without it."""
    for call in message.get("tool_calls") or ():
        without = {name: value for name, value in message.items() if name != "tool_calls"}
        yield f"messages[{index}].tool_calls", str(call["function"].get("name")), without
    if message["role"] == "tool":
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        words = _WORD.findall(text[:_SEARCHED])
        if words:
            yield f"messages[{index}]", max(words, key=len), {**message, "content": type(content)()}


def _renders_to(text: str, render: _Render, conversation: list[dict[str, Any]]) -> bool:
    try:
        return render(conversation) == text
    except Exception:  # the template misses something, which it therefore reads
        return False


def _as_messages(messages: object) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError("messages must be a non-empty list", param="messages")
    return list(messages)


def _message(index: int, message: object) -> dict[str, Any]:
    """One message as templates expect it: content a string, a tool call's arguments an object."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] must be an object with a role", param="messages")
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise InvalidRequestError(f"messages[{index}] has no content", param="messages")
    result = {**message, "content": _content(index, message.get("content"))}
    if calls:
        result["tool_calls"] = [_tool_call(index, call) for call in calls]
    return result


def _content(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"messages[{index}].content: only text parts are supported, got {kind!r}", param="messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(index: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequestError(f"messages[{index}].tool_calls: each needs a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages[{index}].tool_calls: arguments are not JSON: {error}", param="messages"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
