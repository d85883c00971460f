"""Prompts in the forms that users give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

from ..core.constraint_check import CHECKER
from ..core.errors import invalid
from ..core.sampling_params import SamplingParams
from .prepared import ParsedPrompt

_LONG_TEXT = 1500
"""Characters of a prompt whose tokens are found in about a millisecond."""
_MANY_IDS = 20_000
"""Token ids of a prompt that are checked in about a millisecond."""
_FEW_ENTRIES = 20
"""Entries of a parameter, such as bad words, that are checked in about a millisecond."""


class TextPrompt(TypedDict, total=False):
    """A prompt as text, with vLLM's name."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, with vLLM's name."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


Prompt: TypeAlias = str | TextPrompt | TokensPrompt | dict[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids} (both may come together) or token ids."""


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt, or many, as a list.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray, memoryview)):
        raise invalid("prompts", f"must be a prompt or a list of prompts, got {prompts!r}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def is_long(prompt: Prompt | ParsedPrompt, params: object) -> bool:
    """True when checking a request takes more than about a millisecond, so that it belongs into a thread."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    num_ids = len(token_ids) if not isinstance(text, str) and isinstance(token_ids, Sequence) else 0
    lists: tuple[Any, ...] = ()
    if isinstance(params, SamplingParams):
        lists = (params.bad_words, params.allowed_token_ids, params.logit_bias)
    return (
        (isinstance(params, SamplingParams) and params.structured_outputs is not None)
        or (isinstance(text, str) and len(text) > _LONG_TEXT)
        or num_ids > _MANY_IDS
        or any(len(value or ()) > _FEW_ENTRIES for value in lists)
    )


def has_new_constraint(params: object) -> bool:
    """True when checking a request may take seconds, so that it belongs into `CHECKER.thread`."""
    constraint = params.structured_outputs if isinstance(params, SamplingParams) else None
    return constraint is not None and not CHECKER.knows(constraint)
