"""Tokenizer of a GGUF file: built by transformers, corrected if its parts do not follow the file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...platform.core.errors import InvalidRequestError
from ..families.gguf_families import (
    DEEPSEEK_SPLITS,
    FALCON_SPLITS,
    GPT2_SPLITS,
    GPT2_SPLITS_WITHOUT_DIGITS,
    GPT4_SPLITS,
    QWEN35_SPLITS,
    SPLITS_OF_WHOLE_WORDS,
)
from .gguf_file import TOKENS, read_gguf_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_MODEL, _UNREAD = "tokenizer.ggml.model", {"gemma4"}
"""Field that names the kind of tokenizer, and kinds that transformers does not build from a file."""
_SPLIT = "tokenizer.ggml.pre"
"""Field that names the split of text before merges."""
# GPT-4's split, but for the most digits that stay together.
_GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Splits that follow one another: numbers, Chinese and Japanese, all else."""


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file, from the file alone. It raises whatever a broken file makes transformers
    raise.

    Raises:
        InvalidRequestError: the file is damaged, its package is not installed, or its kind of tokenizer is not read.
    """
    from transformers import PreTrainedTokenizerFast

    found = read_gguf_fields(file)
    if (kind := found.get(_MODEL)) in _UNREAD:
        raise InvalidRequestError(
            f"{file}: its tokenizer, {kind}, is not read; name the tokenizer of the checkpoint that it was made of "
            "(--tokenizer)",
            param="tokenizer",
        )
    split = found.get(_SPLIT, "default")
    # Not by `from_pretrained`, which prefers a tokenizer.json next to the file.
    built = PreTrainedTokenizerFast(name_or_path=str(file.parent.absolute()), gguf_file=file.name)
    built = _without_strange_tokens(built, len(found[TOKENS]))
    if not _mend_split(built.backend_tokenizer, split):
        logger.warning(
            "%s: text is split as for GPT-2, because the split %.80r is not known; --tokenizer names another one",
            file,
            split,
        )
    if split in SPLITS_OF_WHOLE_WORDS:
        built.backend_tokenizer.model.ignore_merges = True
        built.add_bos_token = built.init_kwargs.get("add_bos_token", True)  # type: ignore[misc]  # it has a setter
    return built


def _without_strange_tokens(built: PreTrainedTokenizerFast, size: int) -> PreTrainedTokenizerFast:
    """Drop the special tokens of transformers' first models, whose ids are beyond the vocabulary of this one."""
    if max(built.added_tokens_decoder, default=0) < size:
        return built
    from tokenizers import Tokenizer

    parts = json.loads(built.backend_tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < size]
    return type(built)(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), **built.init_kwargs)


def _mend_split(backend: Any, split: str) -> bool:
    """Split text by a rule that transformers does not know; False: nor is it known here."""
    from tokenizers import Regex, pre_tokenizers

    splitter = backend.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.ByteLevel):
        return True
    if split in GPT2_SPLITS_WITHOUT_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), splitter])
    elif split in GPT4_SPLITS:
        backend.pre_tokenizer = _by_patterns(_GPT4_PATTERN % GPT4_SPLITS[split])
    elif split in QWEN35_SPLITS:
        backend.pre_tokenizer = _by_patterns(_QWEN35_PATTERN)
    elif split in DEEPSEEK_SPLITS:
        backend.pre_tokenizer = _by_patterns(*_DEEPSEEK_PATTERNS)
    elif split in FALCON_SPLITS:
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
        numbers = pre_tokenizers.Digits(individual_digits=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Punctuation(behavior="contiguous"), splitter, numbers, threes]
        )
    else:
        return split in GPT2_SPLITS
    return True


def _by_patterns(*patterns: str) -> Any:
    """Splits by patterns, one after another, then bytes."""
    from tokenizers import Regex, pre_tokenizers

    words = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
