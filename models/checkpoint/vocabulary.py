"""Comparison of two models' vocabularies, from their tokenizer files alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from ...platform.core.errors import OutriderError
from .gguf_file import TOKENS, is_gguf, read_gguf_fields
from .json_files import read_json

_WHOLE = "tokenizer.json"
_SENTENCEPIECE = "tokenizer.model"
_SPACE_OF_BYTES, _SPACE_OF_PIECES = "Ġ", "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Translation(NamedTuple):
    """Tokens of a model that stand for those of another, by their text."""

    common: list[int]
    """[C] the first model's tokens that the second has too, in ascending order."""
    theirs: list[int]
    """[C] the second model's id of each."""
    stand_ins: list[int]
    """[V] for each of the first model's ids the second model's token with the same text; or with the longest end of it
    that is a token; or the first one."""
    share: float
    """C over the number of tokens of the smaller vocabulary."""


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


def translation(one: Path, other: Path, sizes: tuple[int, int]) -> Translation | None:
    """Translation from the tokens of one folder's tokenizer to those of the other's.

    None when a folder has no tokenizer file that can be compared.

    Args:
        sizes: numbers of embedding rows of the two models. Tokens beyond them do not count.
    """
    first, second = (_texts(folder, size) for folder, size in zip((one, other), sizes, strict=True))
    theirs: dict[bytes, int] = {}
    for token, text in sorted(second.items()):
        theirs.setdefault(text, token)
    if not first or not theirs:
        return None
    stand_ins, common = [min(second)] * sizes[0], dict[bytes, int]()
    longest = max(map(len, theirs))
    for token, text in sorted(first.items()):
        ends = (text[start:] for start in range(max(0, len(text) - longest), len(text)))
        stand_ins[token] = next((theirs[end] for end in ends if end in theirs), stand_ins[token])
        if text in theirs:
            common.setdefault(text, token)
    ids = sorted(common.values())
    return Translation(ids, [stand_ins[token] for token in ids], stand_ins, len(ids) / min(len(first), len(second)))


def _texts(model: Path, size: int) -> dict[int, bytes]:
    """Bytes of each token below `size`: written as those of GPT-2's alphabet or as pieces of SentencePiece."""
    tokens = _read(model)
    starts = [token[:1] for token in tokens]
    alphabet = _alphabet() if starts.count(_SPACE_OF_BYTES) > starts.count(_SPACE_OF_PIECES) else {}
    return {index: _bytes_of(token, alphabet) for token, index in tokens.items() if 0 <= index < size}


def _bytes_of(token: str, alphabet: dict[str, int]) -> bytes:
    if alphabet and all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    if not alphabet and (match := _BYTE_PIECE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return (token if alphabet else token.replace(_SPACE_OF_PIECES, " ")).encode("utf-8", "surrogatepass")


def _alphabet() -> dict[str, int]:
    """The byte of each letter of GPT-2's alphabet: printable ones stand for themselves, others for 256 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


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
    if isinstance(vocabulary, dict):
        pairs = [*vocabulary.items()]
    elif isinstance(vocabulary, list):  # of Unigram: pairs of a token and its score, in the order of the ids
        pairs = [(pair[0], index) for index, pair in enumerate(vocabulary) if isinstance(pair, list) and pair]
    else:
        return {}
    more = added if isinstance(added, list) else []
    pairs += [(token.get("content"), token.get("id")) for token in more if isinstance(token, dict)]
    return {token: index for token, index in pairs if isinstance(token, str) and isinstance(index, int)}
