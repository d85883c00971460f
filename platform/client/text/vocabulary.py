"""The bytes that each token of a vocabulary writes, and the texts of single tokens made of them.

Decoding one id loses what its neighbours decide: a part of a character becomes U+FFFD, and SentencePiece drops a space
at the start of a text. The vocabulary itself says which bytes a token stands for.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, overload
from weakref import WeakKeyDictionary

from ...core.messages import PromptTable, TokenLogprobs
from ...core.outputs import Logprob

TextAndBytes: TypeAlias = tuple[str, bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN_DECODERS = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


class Vocabulary:
    """The bytes of each token, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # At most one entry a token of the vocabulary each.
        self._bytes: dict[int, bytes] = {}
        self._alone: tuple[dict[int, TextAndBytes], dict[int, TextAndBytes]] = ({}, {})
        self.decoded: tuple[dict[int, str], dict[int, str]] = ({}, {})
        """Texts that the decoder gives for one token by itself, by whether special tokens are skipped; filled by those
        who decode."""
        self.specials: Mapping[int, str] = _special_tokens(tokenizer)
        """The tokens that `skip_special_tokens` leaves out of a text."""
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._replaced: list[tuple[str, str]] | None = _replaced(steps) if kinds and kinds <= _PLAIN_DECODERS else None
        """Characters that stand for others in the vocabulary; None if the pieces cannot be read by themselves."""
        reads_in_context = not self._is_byte_level and self._replaced is None
        self.strips_first_space = reads_in_context or any(
            (step["type"] == "Strip" and step["start"]) or step.get("prepend_scheme", "never") != "never"
            for step in steps
        )
        """True when a text begins without the space that its first token has."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that the token adds to a text."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._read(token_id)
        return data

    def alone(self, token_id: int, skip_special_tokens: bool) -> TextAndBytes:
        """Text and bytes of a token without the others of its text; a special token that is skipped has no bytes."""
        known = self._alone[skip_special_tokens]
        entry = known.get(token_id)
        if entry is None:
            is_skipped = skip_special_tokens and token_id in self.specials
            entry = (self.specials[token_id], b"") if is_skipped else _readable(self.token_bytes(token_id))
            known[token_id] = entry
        return entry

    def decode(self, token_ids: list[int]) -> str:
        """The text of the tokens, special ones included, as the vocabulary has it: nothing is "cleaned up"."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return str(self._tokenizer.decode(token_ids))
        return str(backend.decode(token_ids, skip_special_tokens=False))

    def _read(self, token_id: int) -> bytes:
        if self._is_byte_level or self._replaced is not None:
            piece = _piece(self._tokenizer, token_id)
            if self._is_byte_level:
                return _from_byte_level(piece)
            match = _BYTE_TOKEN.fullmatch(piece) if self._has_byte_tokens else None
            if match is not None:
                return bytes.fromhex(match[1])
            for old, new in self._replaced or ():
                piece = piece.replace(old, new)
            return piece.encode("utf-8", "surrogatepass")
        return self._read_in_context(token_id)

    def _read_in_context(self, token_id: int) -> bytes:
        """The bytes that the token adds after the letter "a", by decoding: for tokenizers of other kinds."""
        encode, decode = getattr(self._tokenizer, "encode", None), self._tokenizer.decode
        context = list(encode("a", add_special_tokens=False))[-1:] if encode is not None else []
        before, after = decode(context) if context else "", decode([*context, token_id])
        text: str = after[len(before) :] if after.startswith(before) else decode([token_id])
        return text.encode("utf-8", "surrogatepass")


_vocabularies: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """The tokenizer's vocabulary, read once."""
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        vocabulary = _vocabularies[tokenizer] = Vocabulary(tokenizer)
    return vocabulary


class TokenTexts:
    """Texts of a sequence's tokens in their order, which joined are its text.

    A character belongs to the token that completes it: the tokens before have the text "". An alternative that is a
    part of a character is written as OpenAI does, "bytes:\\xe4". A token that the text leaves out has no bytes.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, at_start: bool) -> None:
        """
        Args:
            at_start: no text comes before, so that a first space may be stripped.
        """
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._strips = at_start and vocabulary.strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int, *, is_last: bool = False) -> TextAndBytes:
        """Text and bytes of the next token; at the last one an incomplete character becomes U+FFFD."""
        text, data = self._vocabulary.alone(token_id, self._skip)
        if self._skip and token_id in self._vocabulary.specials:
            return text, data
        if self._strips and data.startswith(b" "):
            data = data[1:]
        self._strips = False
        return self._utf8.decode(data, is_last), data

    def logprobs(self, position: TokenLogprobs, *, is_last: bool = False, is_shown: bool = True) -> dict[int, Logprob]:
        """The next position's log-probabilities by token id: the token itself first, then the top ones.

        Args:
            is_shown: False if the token ended the sequence and is not in its text.
        """
        token_id = position.token_ids[0]
        if is_shown:
            return self.entries(position, self.next(token_id, is_last=is_last))
        return self.entries(position, (self._vocabulary.alone(token_id, self._skip)[0], b""))

    def entries(self, position: TokenLogprobs, chosen: TextAndBytes) -> dict[int, Logprob]:
        """One position's log-probabilities, with the text and bytes that `next` gave of its token."""
        token_ids, logprobs = position.token_ids, position.logprobs
        result = {token_ids[0]: Logprob(logprobs[0], position.rank, *chosen)}
        for index in range(1, len(token_ids)):
            token_id = token_ids[index]
            if token_id not in result:
                rank = index if position.ranks is None else position.ranks[index - 1]
                result[token_id] = Logprob(logprobs[index], rank, *self._vocabulary.alone(token_id, self._skip))
        return result


def _readable(data: bytes) -> TextAndBytes:
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def logprobs_without_text(position: TokenLogprobs) -> dict[int, Logprob]:
    """One position's log-probabilities by token id, for requests that want no text."""
    result: dict[int, Logprob] = {}
    ranks = [position.rank, *(position.ranks or range(1, len(position.token_ids)))]
    for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
        if token_id not in result:
            result[token_id] = Logprob(logprob, rank)
    return result


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """Log-probabilities of a prompt. Each position is made when it is read: all together may be a million entries."""

    def __init__(self, token_ids: Sequence[int], positions: PromptTable, vocabulary: Vocabulary | None) -> None:
        """
        Args:
            token_ids: the prompt's, of which those without a position are read.
            vocabulary: None for log-probabilities without texts.
        """
        self._token_ids = token_ids
        self._positions = positions
        self._texts = None if vocabulary is None else TokenTexts(vocabulary, skip_special_tokens=False, at_start=True)
        self._chosen: list[TextAndBytes] = []  # of the first tokens: each depends on those before

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position, texts = self._positions[index], self._texts
        if position is None:
            return None
        if texts is None:
            return logprobs_without_text(position)
        last = range(len(self))[index]
        for i in range(len(self._chosen), last + 1):
            before = self._positions[i]
            self._chosen.append(texts.next(self._token_ids[i] if before is None else before.token_ids[0]))
        return texts.entries(position, self._chosen[last])


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id: token.content for token_id, token in added.items() if token.special}


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of a Rust tokenizer's decoder; for others as far as their attributes allow."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        decoder = backend.decoder
        return [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
    if hasattr(tokenizer, "sp_model"):
        return [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Strip", "start": 1},
        ]
    return [{"type": "ByteLevel"}] if hasattr(tokenizer, "byte_decoder") else []


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [inner for part in step["decoders"] for inner in _flat(part)]
    return [step]


def _replaced(steps: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
    pairs: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Metaspace":
            pairs.append((step["replacement"], " "))
        elif step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            pairs.append((step["pattern"]["String"], step["content"]))
    return pairs


def _piece(tokenizer: Any, token_id: int) -> str:
    """The token as the vocabulary writes it; "" for ids beyond its end, which padded models have."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        piece = tokenizer.convert_ids_to_tokens(token_id) if backend is None else backend.id_to_token(token_id)
    except (IndexError, KeyError):
        return ""
    return piece or ""


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's map: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _from_byte_level(piece: str) -> bytes:
    """A piece with characters outside the map is an added token, and stands for itself."""
    try:
        return bytes(map(_byte_of_char().__getitem__, piece))
    except KeyError:
        return piece.encode("utf-8", "surrogatepass")
