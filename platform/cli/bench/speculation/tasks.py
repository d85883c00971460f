"""The tasks: prompts, and the adapter, with and without draft weights, that answers them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ....core.lora_request import LoRARequest
from ..prompt_files import Prompt, encode
from ..prompts import DEMO_PROMPTS, random_ids

BASE, RANDOM = "base", "random text"
"""Names of tasks, which no adapter may have."""
_BARE = "-without-draft"
"""Suffix of the names of adapters that lack their draft weights."""
PLAIN, WITH_DRAFT, WITHOUT_DRAFT, RANDOM_TEXT = "base model", "with draft weights", "without draft weights", "random"
"""Kinds of rows in the result. An adapter under a mode that takes no draft weights counts as without."""
_RANDOM_PROMPTS, _RANDOM_LENGTH = 8, 32


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, and the adapter that answers them."""

    name: str
    prompts: list[list[int]]
    adapter: LoRARequest | None = None
    """The adapter as given, with its draft weights if it has any."""
    bare: LoRARequest | None = None
    """The adapter without its draft weights; None when it has none."""
    random: bool = False
    """True for random tokens, sampled at temperature 1, which no drafter can guess."""


def check_adapter_names(names: Iterable[str]) -> None:
    """Refuse names of tasks, and names of adapters without draft weights.

    Raises:
        InvalidRequestError: names the adapter.
    """
    for name in names:
        if name in (BASE, RANDOM):
            raise InvalidRequestError(f"no adapter can be called {name!r}, which is a task's name", param="lora")
        if name.endswith(_BARE):
            raise InvalidRequestError(
                f"no adapter can be called {name!r}: {_BARE} marks adapters without their draft weights", param="lora"
            )


def make_tasks(
    tokenizer: Any, adapters: Mapping[str, str], prompts: Sequence[Prompt] | None, names: Sequence[str] | None
) -> list[Task]:
    """The base model's task and one for each adapter (name -> folder).

    Prompts that name an adapter are for it; an adapter without any gets the base model's. The default of `prompts` is
    the demo's, by the adapters' names.

    Args:
        names: the tasks wanted; None for all.

    Raises:
        InvalidRequestError: an unknown task or adapter, or a task without prompts.
    """
    if prompts is None:
        prompts = [Prompt(text, None if task == BASE else task) for task, ts in DEMO_PROMPTS.items() for text in ts]
    else:
        unknown = next((p.adapter for p in prompts if p.adapter is not None and p.adapter not in adapters), None)
        if unknown is not None:
            raise InvalidRequestError(f"a prompt names the adapter {unknown!r}; give it with --lora", param="prompts")
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
        tasks.append(Task(name, [encode(tokenizer, p.content, "prompts") for p in chosen], adapter))
    return tasks


def random_task(vocab_size: int, special_ids: Collection[int] = ()) -> Task:
    """Prompts of random token ids, none of them special, for the base model."""
    generator = random.Random(0)
    prompts = [random_ids(generator, _RANDOM_LENGTH, vocab_size, special_ids) for _ in range(_RANDOM_PROMPTS)]
    return Task(RANDOM, prompts, random=True)


def without_draft_weights(task: Task, folder: Path) -> Task:
    """`task` with a copy of its adapter, in `folder`, that lacks the draft weights; itself when there are none."""
    if task.adapter is None or not os.path.isdir(Path(task.adapter.path) / "draft"):
        return task
    copy = Path(tempfile.mkdtemp(dir=folder)) / "adapter"  # not by the name, which may hold anything
    shutil.copytree(task.adapter.path, copy, ignore=shutil.ignore_patterns("draft"))
    bare = LoRARequest(task.name + _BARE, path=str(copy))
    return Task(task.name, task.prompts, task.adapter, bare)
