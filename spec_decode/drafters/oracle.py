"""Oracle: recorded answers as drafts. It measures the limit of speculation: what drafts that are always right gain.

The file has lines as `outrider train-draft --generate` writes them: {"prompt_token_ids": [...], "completion_token_ids":
[...]}. `outrider bench speculation --modes oracle` records the answers without drafts itself.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...platform.core.errors import InvalidRequestError, NotFoundError
from ...platform.core.request import NO_DRAFTS, Drafts
from ...platform.core.speculative_config import SpeculativeConfig
from .base import Drafter, DraftRow, Proposal, TargetOutput
from .factory import DrafterContext


class OracleDrafter(Drafter):
    """Drafts the rest of a recorded answer that begins with the request's tokens."""

    def __init__(self, recorded: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """recorded: prompts and their answers, as token ids; a prompt may have several."""
        self._answers: dict[bytes, list[list[int]]] = {}
        for prompt, answer in recorded:
            self._answers.setdefault(_key(prompt), []).append(list(answer))

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """See `Drafter`."""
        return [Proposal(self._drafts(row) if row.max_drafts else NO_DRAFTS, len(row.tokens)) for row in rows]

    def _drafts(self, row: DraftRow) -> Drafts:
        start = row.request.num_prompt_tokens
        given = list(row.tokens[start:])
        for answer in self._answers.get(_key(row.tokens[:start]), ()):
            if answer[: len(given)] == given:
                return Drafts(answer[len(given) : len(given) + row.max_drafts])
        return NO_DRAFTS


def _key(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def load(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    """The oracle of the file `config.model`.

    Raises:
        NotFoundError, InvalidRequestError: it cannot be read, or a line is no recorded answer.
    """
    path = Path(config.model or "")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise NotFoundError(f"cannot be read: {error}", param="speculative_config") from error
    vocab_size = context.target.config.vocab_size
    return OracleDrafter(_recorded(line, number, vocab_size) for number, line in enumerate(lines, 1) if line.strip())


def _recorded(line: str, number: int, vocab_size: int) -> tuple[list[int], list[int]]:
    try:
        record: Any = json.loads(line)
        prompt, answer = record["prompt_token_ids"], record["completion_token_ids"]
        _key(prompt), _key(answer)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        wanted = "an object with prompt_token_ids and completion_token_ids, lists of integers"
        raise InvalidRequestError(f"line {number} is not {wanted}", param="speculative_config") from error
    if not all(0 <= token < vocab_size for token in answer):
        message = f"line {number} has token ids that are not below {vocab_size}, the size of the vocabulary"
        raise InvalidRequestError(message, param="speculative_config")
    return prompt, answer
