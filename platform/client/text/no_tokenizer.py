"""Errors of an engine that runs without a tokenizer (`skip_tokenizer_init`): token ids go in and come out."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequestError

OPTION = "skip_tokenizer_init"


def needed(tokenizer: Any, what: str, param: str) -> Any:
    """The tokenizer, which is None under `skip_tokenizer_init`.

    Args:
        what: subject of the error, which needs the tokenizer.
        param: field that the error names.

    Raises:
        InvalidRequestError: there is none.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            f"{what} needs the tokenizer, which {OPTION} leaves out; prompts are token ids", param=param
        )
    return tokenizer
