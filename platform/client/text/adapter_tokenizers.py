"""Tokenizers that adapters bring: those with tokens that the model's tokenizer lacks, or calls otherwise.

PEFT's users mostly save a copy of the model's tokenizer with the adapter. It changes nothing, and the model's serves.
Of another one the vocabulary, the added tokens and the tokens around a text are taken. How a text is normalised, split
and put together again stays the model's: those are programs, and adapters may be a stranger's.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from ....models.checkpoint.json_files import parse_json
from ....models.checkpoint.tokenizer import end_ids
from ...core.adapter_files import GENERATION_CONFIG, TOKENIZER_FILE, TOKENIZER_SETTINGS, AdapterFolder
from ...core.errors import AdapterError, InvalidRequestError
from .adapter_templates import MAX_BYTES as MAX_SETTINGS_BYTES

MAX_BYTES = 64 << 20
"""Largest tokenizer.json that is read; those of vocabularies with 256,000 tokens have 35 MB."""
MAX_ADDED_WORDS = 1 << 15
"""Most words beyond those of the model's tokenizer. Adapters for another language add some 20,000; to read as many as
this takes less than a second of the API process."""
_WORD_BYTES = 256
"""Largest size of an added token in a tokenizer.json that is indented."""
_GENERATION_BYTES = 1 << 20
"""Largest generation_config.json that is read; it has some lines."""
MAX_TOKENIZERS = 32
"""Different tokenizers that are kept. Adapters may share one."""
MAX_WORDS = 1 << 21
"""Words of all tokenizers that are kept; a million take some 800 MB."""
MAX_TOKEN_CHARS = 1024
"""Longest token that an adapter adds: an answer may say it at each of its positions."""
MAX_TEMPLATE_TOKENS = 64
"""Most tokens that are put around a text."""
_MAX_KEYS = 4096
"""States of files that are remembered."""
_PROGRAM = ("normalizer", "pre_tokenizer", "decoder")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


T = TypeVar("T")


class OwnTokenizer(NamedTuple):
    """A tokenizer of an adapter."""

    tokenizer: Any
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence by the adapter's files, in addition to the model's."""


class AdapterTokenizers(Generic[T]):
    """Tokenizers of adapters' folders, by content, and what is made of them. Thread-safe."""

    def __init__(self, base: Any, make: Callable[[OwnTokenizer], T]) -> None:
        """`base` is the model's tokenizer; `make` is called once for each other one that is read."""
        self._base = base
        self._make = make
        self._lock = Lock()  # guards what follows, and is never held while a file is read
        self._digests: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()  # by the states of the files
        self._found: OrderedDict[bytes, tuple[T | None, int]] = OrderedDict()  # with the number of words

    @cached_property
    def max_bytes(self) -> int:
        """Size of the largest tokenizer.json that is read: twice the model's, indented, and the added words."""
        own = len(self._base.backend_tokenizer.to_str(pretty=True).encode())
        return min(MAX_BYTES, 2 * own + MAX_ADDED_WORDS * _WORD_BYTES)

    def read(self, folder: AdapterFolder) -> T | None:
        """Return what was made of the tokenizer of an adapter's folder; None if the model's serves. May take a
        second.

        Raises:
            AdapterError: there is one that cannot be read.
        """
        if getattr(self._base, "backend_tokenizer", None) is None:
            return None  # the model's is of another kind, which knows no such files
        states = [folder.inspect(name) for name in (TOKENIZER_FILE, TOKENIZER_SETTINGS, GENERATION_CONFIG)]
        if states[0] is None:
            return None
        key = (folder, *(found and (found[0], *found[1][1:3], *found[1][6:]) for found in states))
        with self._lock:
            known = self._digests.get(key)
            if known is not None and known in self._found:
                self._found.move_to_end(known)
                return self._found[known][0]
        try:
            return self._read(folder, key)
        except AdapterError:
            raise
        except BaseException as error:  # the library raises many types for a broken file
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise folder.error(TOKENIZER_FILE, f"cannot be read: {error}"[:300]) from error

    def _read(self, folder: AdapterFolder, key: tuple[Any, ...]) -> T | None:
        content = folder.read(TOKENIZER_FILE, self.max_bytes)
        if content is None:
            return None
        settings = folder.read(TOKENIZER_SETTINGS, MAX_SETTINGS_BYTES) or b"{}"
        more = folder.read(GENERATION_CONFIG, _GENERATION_BYTES) or b"{}"
        digest = hashlib.sha256(content + settings + more).digest()
        with self._lock:
            made = self._found.get(digest)
        if made is None:
            tokenizer = _tokenizer(self._base, json.loads(content), json.loads(settings))
            made = (None, 0) if tokenizer is None else (self._make(_with_ends(tokenizer, more)), len(tokenizer))
        with self._lock:
            self._found[digest] = made
            self._found.move_to_end(digest)
            self._digests[key] = digest
            while len(self._digests) > _MAX_KEYS:
                self._digests.popitem(last=False)
            while len(self._found) > MAX_TOKENIZERS or sum(words for _, words in self._found.values()) > MAX_WORDS:
                if len(self._found) == 1:
                    break  # a single one is kept, however large
                self._found.popitem(last=False)
        return made[0]


def _with_ends(tokenizer: Any, generation_config: bytes) -> OwnTokenizer:
    try:
        ends = end_ids(parse_json(generation_config, GENERATION_CONFIG).get("eos_token_id"), GENERATION_CONFIG)
    except InvalidRequestError as error:
        raise AdapterError(f"{error.message}", param="lora_path") from error
    return OwnTokenizer(tokenizer, ends | end_ids(tokenizer.eos_token_id, TOKENIZER_FILE))


def renamed_token(base: Any, own: Any) -> str | None:
    """Token of the model's vocabulary, special ones aside, that has another id in an adapter's tokenizer, or none; None
    where each has its own."""
    known, special = own.get_vocab(), set(base.all_special_tokens)
    return next((t for t, index in base.get_vocab().items() if known.get(t) != index and t not in special), None)


@lru_cache(maxsize=2)
def _base_tokens(base: Any) -> tuple[dict[str, int], frozenset[str]]:
    """Ids of the model's tokens, and its added tokens."""
    return base.get_vocab(), frozenset(token.content for token in base.added_tokens_decoder.values())


def _tokenizer(base: Any, content: dict[str, Any], settings: Mapping[str, Any]) -> Any | None:
    """Make the tokenizer of a tokenizer.json; None if it has the model's tokens."""
    known, known_added = _base_tokens(base)
    vocab = content["model"]["vocab"]  # {token: id}, or a list of [token, score]
    vocab = dict(vocab) if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
    most = len(known.keys() | known_added) + MAX_ADDED_WORDS
    if len(vocab) + len(added) > most + len(known_added):
        raise AdapterError(
            f"{TOKENIZER_FILE} of the adapter has {len(vocab) + len(added)} words; at most {most} are read: the "
            f"model's and {MAX_ADDED_WORDS} more",
            param="lora_path",
        )
    if added.keys() <= known_added and all(known.get(token) == index for token, index in (vocab | added).items()):
        return None
    longest = max(map(len, (vocab | added).keys() - known.keys()), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise AdapterError(
            f"{TOKENIZER_FILE} of the adapter has a token of {longest} characters; at most {MAX_TOKEN_CHARS}",
            param="lora_path",
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
                f"{TOKENIZER_FILE} of the adapter: the added token {token[:80]!r} has no id {index}", param="lora_path"
            )
    if backend.num_special_tokens_to_add(is_pair=False) > MAX_TEMPLATE_TOKENS:
        raise AdapterError(
            f"{TOKENIZER_FILE} of the adapter: post_processor adds more than {MAX_TEMPLATE_TOKENS} tokens",
            param="lora_path",
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
        raise AdapterError(f"{TOKENIZER_FILE} of the adapter: post_processor repeats the text", param="lora_path")


def _special(value: Any) -> str | None:
    """Return a special token as text; files have it as text or as an object."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None
