"""The model's tokenizer and the tokens that end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..platform.core.errors import InvalidRequestError, NotFoundError
from .json_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory, from its files alone.

    Raises:
        NotFoundError: there is no such directory.
        InvalidRequestError: it holds no tokenizer that transformers can load.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise NotFoundError(f"tokenizer {str(path)!r}: there is no such directory", param="tokenizer")
    try:
        tokenizer = _load(directory)
    except Exception as error:  # whatever a broken or missing file makes transformers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequestError(
            f"no tokenizer could be loaded from {directory}: {reason}", param="tokenizer"
        ) from error
    # Lengths are checked against the model's: the library's warning of "indexing errors" counts as given.
    getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _load(directory: Path) -> PreTrainedTokenizerBase:
    if _is_plain(directory):
        # `AutoTokenizer` would choose the same class, but imports torch and seconds of other things first.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _is_plain(directory: Path) -> bool:
    """Whether it is all in tokenizer.json. Of Llama alone, since for other families transformers may know better."""
    files = [directory / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return False
    settings = read_json(files[2])
    plain = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return plain and "auto_map" not in settings and read_json(files[0]).get("model_type") == "llama"


def eos_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Every token that generation_config.json, config.json or the tokenizer calls the end of a sequence."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            found |= _ids(read_json(file).get("eos_token_id"))
    return frozenset(found | _ids(getattr(tokenizer, "eos_token_id", None)))


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}
