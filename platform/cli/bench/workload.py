"""What is asked: tasks, each with its prompts and the adapter, with and without draft weights, that answers them."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...client.text.chat_template import ChatOptions, render_messages
from ...core.errors import InvalidRequestError, NotFoundError
from ...core.lora_request import LoRARequest
from .prompts import DEMO_PROMPTS

BASE, RANDOM = "base", "random text"
"""Names of tasks, which no adapter may have."""
_BARE = "-without-draft"
PLAIN, WITH_DRAFT, WITHOUT_DRAFT, RANDOM_TEXT = "base model", "with draft weights", "without draft weights", "random"
"""Kinds of rows in the result. An adapter under a mode that takes no draft weights counts as without."""
_RANDOM_PROMPTS, _RANDOM_LENGTH = 8, 32


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, and who answers them."""

    name: str
    prompts: list[list[int]]
    adapter: LoRARequest | None = None
    """As it is, with its draft weights if it has any."""
    bare: LoRARequest | None = None
    """The same adapter without its draft weights; None when it has none."""
    random: bool = False
    """Random tokens, sampled at temperature 1: nothing that a drafter could guess."""


class Prompt(NamedTuple):
    """One line of a prompts file."""

    content: Any
    """A text, messages, or token ids."""
    adapter: str | None


def read_prompts(path: Path) -> list[Prompt]:
    """Lines of JSON: {"prompt": text} or {"messages": [...]} or {"prompt_token_ids": [...]}, each maybe with "adapter".

    Raises:
        NotFoundError, InvalidRequestError: there is no such file, or a line is something else.
    """
    try:
        # `splitlines` would also break at separators that JSON allows inside strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise NotFoundError(f"prompts file {path}: {error}", param="prompts") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompts file {path} is not UTF-8: {error}", param="prompts") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{path}, line {number}: not valid JSON: {error}", param="prompts") from None
        keys = [key for key in ("prompt", "messages", "prompt_token_ids") if isinstance(value, dict) and key in value]
        if len(keys) != 1:
            raise InvalidRequestError(
                f"{path}, line {number}: needs exactly one of prompt, messages, prompt_token_ids", param="prompts"
            )
        ids = value.get("prompt_token_ids", [])
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InvalidRequestError(
                f"{path}, line {number}: prompt_token_ids must be a list of integers", param="prompts"
            )
        adapter = value.get("adapter")
        if adapter is not None and not isinstance(adapter, str):
            raise InvalidRequestError(
                f"{path}, line {number}: adapter must be a name, got {adapter!r:.40}", param="prompts"
            )
        found.append(Prompt(value[keys[0]], adapter))
    if not found:
        raise InvalidRequestError(f"{path} holds no prompts", param="prompts")
    return found


def check_adapter_names(names: Sequence[str]) -> None:
    """Refuse names that stand for something else, or for two adapters.

    Raises:
        InvalidRequestError: names the adapter.
    """
    for number, name in enumerate(names):
        if name in (BASE, RANDOM):
            raise InvalidRequestError(
                f"--lora: no adapter can be called {name!r}, which is a task's name", param="lora"
            )
        if name in names[:number]:
            raise InvalidRequestError(f"--lora: there are two adapters called {name!r}", param="lora")
        if name.endswith(_BARE):
            raise InvalidRequestError(
                f"--lora: no adapter can be called {name!r}: adapters without their draft weights get names that end "
                f"in {_BARE}",
                param="lora",
            )


def make_tasks(
    tokenizer: Any, adapters: Mapping[str, str], prompts: Sequence[Prompt] | None, names: Sequence[str] | None
) -> list[Task]:
    """The base model's task and one for each adapter (name -> folder).

    Prompts that name an adapter are its own; an adapter without any gets the base model's. Without `prompts`, those of
    the demo, by the adapters' names.

    Args:
        names: the tasks wanted; None for all.

    Raises:
        InvalidRequestError: an unknown task or adapter, or a task without prompts.
    """
    if prompts is None:
        prompts = [Prompt(text, None if task == BASE else task) for task, ts in DEMO_PROMPTS.items() for text in ts]
    else:
        stranger = next((p.adapter for p in prompts if p.adapter is not None and p.adapter not in adapters), None)
        if stranger is not None:
            raise InvalidRequestError(f"a prompt names the adapter {stranger!r}; give it with --lora", param="prompts")
    wanted = list(dict.fromkeys(names)) if names is not None else [BASE, *adapters]
    tasks = []
    for name in wanted:
        if name != BASE and name not in adapters:
            raise InvalidRequestError(f"unknown task {name!r}; known are {', '.join([BASE, *adapters])}", param="tasks")
        own = [p for p in prompts if p.adapter == (None if name == BASE else name)]
        chosen = own or [p for p in prompts if p.adapter is None]
        if not chosen:
            raise InvalidRequestError(f"there is no prompt for the task {name!r}", param="prompts")
        adapter = None if name == BASE else LoRARequest(name, path=adapters[name])
        tasks.append(Task(name, [encode(tokenizer, p.content) for p in chosen], adapter))
    return tasks


def encode(tokenizer: Any, content: Any) -> list[int]:
    """Token ids of a prompt; a text is a user's turn where the model has a chat template.

    Raises:
        InvalidRequestError: it is neither a text, nor messages, nor token ids.
    """
    if isinstance(content, str):
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(content))
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"a prompt must be text, messages or token ids, got {content!r}", param="prompts")
    if all(type(item) is int for item in content):
        return content
    return list(tokenizer.encode(render_messages(tokenizer, content, ChatOptions()), add_special_tokens=False))


def random_task(vocab_size: int, special_ids: Collection[int] = ()) -> Task:
    """Prompts of random token ids, none of them special, for the base model."""
    generator = random.Random(0)
    ordinary = [token for token in range(vocab_size) if token not in special_ids]
    prompts = [generator.choices(ordinary, k=_RANDOM_LENGTH) for _ in range(_RANDOM_PROMPTS)]
    return Task(RANDOM, prompts, random=True)


def without_draft_weights(task: Task, folder: Path) -> Task:
    """`task` with a copy of its adapter, in `folder`, that lacks the draft weights; itself when there are none."""
    if task.adapter is None or not os.path.isdir(Path(task.adapter.path) / "draft"):
        return task
    copy = Path(tempfile.mkdtemp(dir=folder)) / "adapter"  # not by the name, which may hold anything
    shutil.copytree(task.adapter.path, copy, ignore=shutil.ignore_patterns("draft"))
    bare = LoRARequest(task.name + _BARE, path=str(copy))
    return Task(task.name, task.prompts, task.adapter, bare)
