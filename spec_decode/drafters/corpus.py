"""Corpora for prompt lookup: texts of the operator, for all requests or for those of one tenant.

    FILE                    for all requests
    FOLDER/FILE             likewise
    FOLDER/TENANT/FILE      for the requests of that tenant alone

A file is a text, or with the suffix .jsonl lines with `text`, `token_ids` or `completion_token_ids`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...platform.core.errors import InvalidRequestError, NotFoundError
from ...platform.core.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from .factory import DrafterContext

MAX_TOKENS = 16 * 2**20
"""Most tokens of all corpora together: a corpus takes 12 bytes a token, and three times as many while it is sorted."""
MAX_BYTES = 256 * 2**20
"""Most bytes of all files together."""
_DEPTH = 64
"""Longest match that is searched: the largest `prompt_lookup_max`."""
_END = -1
"""Between two texts. No token is equal to it, so no match reaches over it."""


class Corpus:
    """Token ids of texts, and their prefixes in the order of their last tokens (a suffix array of the reversed texts,
    Manber & Myers 1990), so that one binary search finds the longest match."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        tokens = np.concatenate([np.array([*text, _END], dtype=np.int32) for text in texts])
        self._tokens = tokens
        self._order = _sorted_prefixes(tokens)

    def find(self, last: Sequence[int], least: int) -> tuple[int, int]:
        """Find the longest match of the end of `last`.

        Returns:
            (index after the match, its number of tokens), the number at least `least`; (-1, 0) for none.
        """
        wanted = list(last[: -_DEPTH - 1 : -1])
        index = bisect_left(self._order, wanted, key=lambda end: self._reversed(int(end), len(wanted)))
        best, length = -1, least - 1
        for at in (index - 1, index):
            if 0 <= at < len(self._order):
                end = int(self._order[at])
                same = _common(wanted, self._reversed(end, len(wanted)))
                if same > length:
                    best, length = end + 1, same
        return (best, length) if best >= 0 else (-1, 0)

    def continuation(self, start: int, count: int) -> list[int]:
        """At most `count` tokens from `start` on, to the end of the text."""
        found: list[int] = self._tokens[start : start + count].tolist()
        return found[: found.index(_END)] if _END in found else found

    def _reversed(self, end: int, count: int) -> list[int]:
        """`count` tokens from `end` backwards."""
        found: list[int] = self._tokens[max(0, end - count + 1) : end + 1][::-1].tolist()
        return found


def _sorted_prefixes(tokens: np.ndarray) -> np.ndarray:
    """Indices of tokens in the order of the texts that end there, read backwards to `_DEPTH` tokens. Those without a
    next token in their text are left out."""
    _, ranks = np.unique(tokens[::-1], return_inverse=True)
    ranks = ranks.astype(np.int64) + 1
    width = 1
    order = np.argsort(ranks, kind="stable")
    while width < _DEPTH:
        after = np.zeros_like(ranks)
        after[:-width] = ranks[width:]
        keys = ranks * (len(ranks) + 2) + after
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        ranks[order] = np.concatenate(([1], 1 + np.cumsum(sorted_keys[1:] != sorted_keys[:-1])))
        width *= 2
    ends = len(tokens) - 1 - order
    ends = ends[tokens[ends] != _END]
    return ends[tokens[ends + 1] != _END]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


class Corpora:
    """The corpora of an engine. Text of a tenant's corpus reaches that tenant's requests alone."""

    def __init__(self, shared: Corpus | None, by_tenant: dict[str, Corpus]) -> None:
        self._shared, self._by_tenant = shared, by_tenant

    def drafts(self, tenant: str, tokens: Sequence[int], longest: int, least: int, count: int) -> tuple[list[int], int]:
        """The text after the longest match in the corpora of a tenant.

        Args:
            longest: tokens at the end of `tokens` that are looked up.
            least: least number of tokens that match.
            count: most tokens to return.

        Returns:
            (drafts, tokens that matched); ([], 0) without a match.
        """
        drafts: list[int] = []
        length = 0
        last = tokens[-longest:]
        for corpus in (self._by_tenant.get(tenant) if tenant else None, self._shared):
            if corpus is not None:
                start, same = corpus.find(last, max(least, length + 1))
                if start >= 0:
                    drafts, length = corpus.continuation(start, count), same
        return drafts, length


def load_corpora(config: SpeculativeConfig, context: DrafterContext) -> Corpora | None:
    """The corpora of `prompt_lookup_corpus`; None if there is none.

    Raises:
        NotFoundError, InvalidRequestError: a file cannot be read or used; the message names it.
    """
    if config.prompt_lookup_corpus is None:
        return None
    path = Path(config.prompt_lookup_corpus)
    try:
        if not path.exists():
            message = f"speculative_config: prompt_lookup_corpus: there is no {path}"
            raise NotFoundError(message, param="speculative_config")
        entries = [path] if path.is_file() else _entries(path)
        shared = [entry for entry in entries if entry.is_file()]
        tenants = {folder.name: list(filter(Path.is_file, _entries(folder))) for folder in entries if folder.is_dir()}
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    texts = _Texts(context)
    found = texts.read(shared)
    by_tenant = {name: texts.read(files) for name, files in tenants.items()}
    if found is None and not any(by_tenant.values()):
        raise InvalidRequestError(
            f"speculative_config: prompt_lookup_corpus: {path} holds no text", param="speculative_config"
        )
    return Corpora(found, {name: corpus for name, corpus in by_tenant.items() if corpus is not None})


def _entries(folder: Path) -> list[Path]:
    """Files and folders in a folder. Hidden ones are left out: a mounted ConfigMap has copies of its files in them."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


class _Texts:
    """Reads files with the target's tokenizer, within the bounds of all files together."""

    def __init__(self, context: DrafterContext) -> None:
        self._model_path = context.model_path or ""
        self._vocab_size = context.target.config.vocab_size
        self._bytes, self._tokens = MAX_BYTES, MAX_TOKENS

    def read(self, files: Sequence[Path]) -> Corpus | None:
        """The corpus of these files; None without a text."""
        texts = [text for file in files for text in self._read(file) if text]
        return Corpus(texts) if texts else None

    def _read(self, file: Path) -> Iterator[list[int]]:
        try:
            self._bytes -= file.stat().st_size
            if self._bytes < 0:
                raise _wrong(file, f"the files have more than {MAX_BYTES:,} bytes")
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong(file, f"cannot be read as text: {error}") from error
        lines = content.split("\n") if file.suffix == ".jsonl" else [content]
        for number, line in enumerate(lines, 1):
            if line.strip():
                text = self._ids(line, file, number) if file.suffix == ".jsonl" else self._encode(line, file)
                self._tokens -= len(text) + 1
                if self._tokens < 0:
                    raise _wrong(file, f"the corpora have more than {MAX_TOKENS:,} tokens")
                yield text

    def _ids(self, line: str, file: Path, number: int) -> list[int]:
        wanted = "an object with text, token_ids or completion_token_ids"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(file, f"line {number} is not {wanted}") from error
        if isinstance(record, dict):
            if isinstance(text := record.get("text"), str):
                if text.isascii() or text == text.encode(errors="replace").decode():
                    return self._encode(text, file)
                raise _wrong(file, f"line {number} has a lone surrogate in text")
            ids = record.get("token_ids", record.get("completion_token_ids"))
            if isinstance(ids, list) and all(type(i) is int and 0 <= i < self._vocab_size for i in ids):
                return ids
        raise _wrong(file, f"line {number} is not {wanted}, of token ids below {self._vocab_size}")

    @cached_property
    def _tokenizer(self) -> Any:
        """Loaded for text: token ids need none."""
        from ...models.checkpoint.tokenizer import load_tokenizer

        return load_tokenizer(self._model_path)

    def _encode(self, text: str, file: Path) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        if (largest := max(ids, default=0)) >= self._vocab_size:
            raise _wrong(file, f"the tokenizer gives token {largest}, the model has {self._vocab_size}")
        return ids


def _wrong(file: Path, message: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"speculative_config: prompt_lookup_corpus: {file}: {message}", param="speculative_config"
    )
