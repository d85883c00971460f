"""Tokenizers that adapters bring: those with tokens that the model's tokenizer lacks, or calls otherwise.

PEFT's users mostly save a copy of the model's tokenizer beside the adapter. It changes nothing, and the model's serves.
Of another one the vocabulary, the added tokens and the tokens around a text are taken. How a text is normalised, split
and put together again stays the model's: those are programs, and adapters may be a stranger's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from ....models.checkpoint.generation_config import FILE as GENERATION_CONFIG
from ....models.checkpoint.tokenizer import eos_token_ids
from ...core.errors import AdapterError
from .adapter_templates import MAX_BYTES as MAX_SETTINGS_BYTES

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
MAX_BYTES = 64 << 20
"""Largest tokenizer.json that is read; those of vocabularies with 256,000 tokens have 35 MB."""
MAX_TOKENIZERS = 32
"""Different tokenizers that are kept; one of 128,000 tokens takes some 100 MB. Adapters may share one."""
MAX_TOKEN_CHARS = 1024
"""Longest token that an adapter adds: an answer may say it at each of its positions."""
MAX_TEMPLATE_TOKENS = 64
"""Most tokens that are put around a text."""
_PROGRAM = ("normalizer", "pre_tokenizer", "decoder")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


T = TypeVar("T")


class OwnTokenizer(NamedTuple):
    """A tokenizer of an adapter."""

    tokenizer: Any
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence by the adapter's files, beside the model's."""


class AdapterTokenizers(Generic[T]):
    """Tokenizers of adapters' folders, by content, and what is made of them. Thread-safe."""

    def __init__(self, base: Any, make: Callable[[OwnTokenizer], T]) -> None:
        """`base` is the model's tokenizer; `make` is called once for each other one that is read."""
        self._base = base
        self._make = make
        self._lock = Lock()  # guards what follows
        self._digests: OrderedDict[tuple[str, int, int, int], bytes] = OrderedDict()  # by file
        self._found: OrderedDict[bytes, T | None] = OrderedDict()

    def read(self, folder: str) -> T | None:
        """Return what was made of the tokenizer of an adapter's folder; None where the model's serves. May take a
        second.

        Raises:
            AdapterError: there is one that cannot be read.
        """
        try:
            with self._lock:
                return self._read(Path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except AdapterError:
            raise
        except BaseException as error:  # the library raises many types for a broken file
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise AdapterError(f"{FILE} of the adapter cannot be read: {error}"[:300], param="lora_path") from error

    def _read(self, folder: Path) -> T | None:
        if getattr(self._base, "backend_tokenizer", None) is None:
            return None  # the model's is of another kind, which knows no such files
        state = os.stat(folder / FILE)
        key = (str(folder), state.st_ino, state.st_mtime_ns, state.st_size)
        known = self._digests.get(key)
        if known is not None and known in self._found:
            self._found.move_to_end(known)
            return self._found[known]
        content, settings = _limited(folder / FILE, MAX_BYTES), b"{}"
        if (folder / SETTINGS).is_file():
            settings = _limited(folder / SETTINGS, MAX_SETTINGS_BYTES)
        more = folder / GENERATION_CONFIG
        digest = hashlib.sha256(content + settings + (_limited(more, 1 << 20) if more.is_file() else b"")).digest()
        if digest not in self._found:
            tokenizer = _tokenizer(self._base, json.loads(content), json.loads(settings))
            ends = frozenset() if tokenizer is None else eos_token_ids(folder, tokenizer)
            self._found[digest] = None if tokenizer is None else self._make(OwnTokenizer(tokenizer, ends))
        self._found.move_to_end(digest)
        self._digests[key] = digest
        for kept, most in ((self._digests, 4096), (self._found, MAX_TOKENIZERS)):
            while len(kept) > most:
                kept.popitem(last=False)
        return self._found[digest]


def renamed_token(base: Any, own: Any) -> str | None:
    """Token of the model's vocabulary, special ones aside, that has another id in an adapter's tokenizer, or none; None
    where each has its own."""
    known, special = own.get_vocab(), set(base.all_special_tokens)
    return next((t for t, index in base.get_vocab().items() if known.get(t) != index and t not in special), None)


def _limited(file: Path, most: int) -> bytes:
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise AdapterError(f"{file.name} of the adapter is larger than {most} bytes", param="lora_path")
    return content


@lru_cache(maxsize=2)
def _tokens_of(base: Any) -> tuple[dict[str, int], frozenset[str]]:
    """Ids of the model's tokens, and its added tokens."""
    return base.get_vocab(), frozenset(token.content for token in base.added_tokens_decoder.values())


def _tokenizer(base: Any, content: dict[str, Any], settings: Mapping[str, Any]) -> Any | None:
    """Make the tokenizer of a tokenizer.json; None where it has the model's tokens."""
    known, known_added = _tokens_of(base)
    vocab = content["model"]["vocab"]  # {token: id}, or a list of [token, score]
    vocab = dict(vocab) if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
    if added.keys() <= known_added and all(known.get(token) == index for token, index in (vocab | added).items()):
        return None
    longest = max(map(len, (vocab | added).keys() - known.keys()), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise AdapterError(
            f"{FILE} of the adapter has a token of {longest} characters; at most {MAX_TOKEN_CHARS}", param="lora_path"
        )
    _check_template(content.get("post_processor"))
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    program = json.loads(base.backend_tokenizer.to_str())
    content |= {part: program[part] for part in _PROGRAM} | {"truncation": None, "padding": None}
    backend = Tokenizer.from_str(json.dumps(content))
    for token, index in added.items():
        if backend.token_to_id(token) != index:
            raise AdapterError(
                f"{FILE} of the adapter: the added token {token[:80]!r} has no id {index}", param="lora_path"
            )
    if backend.num_special_tokens_to_add(is_pair=False) > MAX_TEMPLATE_TOKENS:
        raise AdapterError(
            f"{FILE} of the adapter: post_processor adds more than {MAX_TEMPLATE_TOKENS} tokens", param="lora_path"
        )
    backend.encode("a")  # a template may name tokens that are not there
    special = {name: _special(settings.get(name, getattr(base, name, None))) for name in _SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    for name, token in special.items():
        if token is not None and backend.token_to_id(token) is not None:
            setattr(tokenizer, name, token)
    tokenizer.chat_template = getattr(base, "chat_template", None)
    tokenizer.response_template = getattr(base, "response_template", None)
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _check_template(processor: Any) -> None:
    """Refuse a template that has the text more than once: several in turn would multiply it."""
    if processor is None:
        return
    for part in processor.get("processors", ()):
        _check_template(part)
    if sum("Sequence" in piece for piece in processor.get("single", ())) > 1:
        raise AdapterError(f"{FILE} of the adapter: post_processor repeats the text", param="lora_path")


def _special(value: Any) -> str | None:
    """Return a special token as text; files have it as text or as an object."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None
