"""Comparison of two models' vocabularies, from their tokenizer files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...platform.core.errors import OutriderError
from .gguf_file import TOKENS, is_gguf, read_gguf_fields
from .json_files import read_json

_WHOLE = "tokenizer.json"
_SENTENCEPIECE = "tokenizer.model"


def agreement(one: Path, other: Path) -> float | None:
    """Share of tokens that have the same id in both folders' tokenizers, of the tokens of the larger vocabulary; either
    may be a GGUF file.

    None when a folder has no tokenizer file that can be compared.
    """
    if any(_same_bytes(one / name, other / name) for name in (_WHOLE, _SENTENCEPIECE)):
        return 1.0
    first, second = _read(one), _read(other)
    if not first or not second:
        return None
    return len(first.items() & second.items()) / max(len(first), len(second))


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _read(model: Path) -> dict[str, int]:
    """Ids by token; empty when there is no file of the `tokenizers` library."""
    try:
        if is_gguf(model):
            return {token: index for index, token in enumerate(read_gguf_fields(model)[TOKENS])}
        raw = read_json(model / _WHOLE)
    except OutriderError:
        return {}
    pieces, added = raw.get("model"), raw.get("added_tokens")
    vocabulary: Any = pieces.get("vocab") if isinstance(pieces, dict) else None
    if isinstance(vocabulary, list):  # of Unigram: pairs of a token and its score, in the order of the ids
        vocabulary = {pair[0]: index for index, pair in enumerate(vocabulary) if isinstance(pair, list) and pair}
    if not isinstance(vocabulary, dict):
        return {}
    more = added if isinstance(added, list) else []
    named = {token.get("content"): token.get("id") for token in more if isinstance(token, dict)}
    return {
        token: index
        for token, index in {**vocabulary, **named}.items()
        if isinstance(token, str) and isinstance(index, int)
    }
