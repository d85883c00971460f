"""Tokenizer of a model, and the tokens that end a sequence."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...platform.core.errors import InvalidRequestError, NotFoundError
from ...platform.core.model_limits import MAX_TOKEN_IDS
from ...platform.core.sampling_params import quote_for_error
from ..families import FAMILIES
from ..families.multimodal import language_config
from .gguf_file import is_gguf
from .gguf_tokenizer import load_gguf_tokenizer
from .json_files import read_json, read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
_IMPORTING = threading.Lock()


def import_transformers(name: str = "AutoTokenizer") -> None:
    """Import a class of transformers and the modules that it needs. One thread at a time: these modules import each
    other, and two threads would find some of them half made."""
    with _IMPORTING:
        getattr(import_module("transformers"), name)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or a GGUF file, from its files alone.

    Raises:
        NotFoundError: there is no such directory or file.
        InvalidRequestError: it holds no tokenizer that transformers can load, or one that needs a package that is not
            installed.
    """
    directory = Path(path)
    is_file = is_gguf(directory)
    if not (directory.is_file() if is_file else directory.is_dir()):
        what = "file" if is_file else "directory"
        raise NotFoundError(f"tokenizer {str(path)!r}: there is no such {what}", param="tokenizer")
    _check_packages(directory)
    try:
        tokenizer = load_gguf_tokenizer(directory) if is_file else _load(directory)
    except Exception as error:  # whatever a broken or missing file makes transformers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequestError(
            f"no tokenizer could be loaded from {directory}: {reason}", param="tokenizer"
        ) from error
    template = directory / "chat_template.json"  # of processors; transformers' tokenizers do not read it
    if getattr(tokenizer, "chat_template", "") is None and template.is_file():
        tokenizer.chat_template = read_json(template).get("chat_template")
    # The engine checks lengths against the model's: the library's warning of "indexing errors" is marked as given.
    getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _load(directory: Path) -> PreTrainedTokenizerBase:
    if _is_plain(directory):
        # `AutoTokenizer` would choose the same class, but first imports torch and seconds of other modules.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    tekken = directory / "tekken.json"
    if tekken.is_file() and not (directory / "tokenizer.json").is_file():
        return _load_tekken(tekken)
    from transformers import AutoTokenizer

    _warn_of_code(directory)
    # Next to a tekken.json, and if mistral-common is installed, it would choose a tokenizer without a template.
    with _no_tiktoken_cache():
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, mistral_format=False
        )


_ENVIRONMENT = threading.Lock()
"""Held while a variable of the process is changed: one tokenizer is loaded at a time."""


@contextmanager
def _no_tiktoken_cache() -> Iterator[None]:
    """Keep tiktoken from copying a tokenizer.model into the temporary folder of all users: it would go on to read the
    copy after the file has changed."""
    name = "TIKTOKEN_CACHE_DIR"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = ""
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _load_tekken(file: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of Mistral's own file, with the template next to it, or one that mistral-common makes."""
    try:
        mistral: Any = import_module("transformers.integrations.mistral")
        tokenizer: PreTrainedTokenizerFast = mistral.convert_tekken_tokenizer(str(file))
    except ImportError as error:
        raise InvalidRequestError(
            f"{file} is read by mistral-common, which is not installed: pip install 'outrider[mistral]'",
            param="tokenizer",
        ) from error
    tokenizer.add_bos_token = True  # type: ignore[misc]  # it has a setter
    if tokenizer.chat_template is None and find_spec("mistral_common") is None:
        logger.warning("%s has no chat template; mistral-common makes one: pip install 'outrider[mistral]'", file)
    return tokenizer


def _check_packages(directory: Path) -> None:
    """Refuse a lone tokenizer.model that cannot be read here: the error of transformers does not name the missing
    package."""
    file = directory / "tokenizer.model"
    if not file.is_file() or any((directory / name).is_file() for name in ("tokenizer.json", "tekken.json")):
        return
    with file.open("rb") as opened:
        # SentencePiece's files are protocol buffers; tiktoken's are lines of base64 and a number.
        is_sentencepiece = opened.read(1) == b"\n"
    for package in ("sentencepiece", "google.protobuf") if is_sentencepiece else ("tiktoken",):
        try:
            import_module(package)
        except ImportError as error:
            raise InvalidRequestError(
                f"{file} is read by {package}, which is not installed: pip install 'outrider[sentencepiece]'",
                param="tokenizer",
            ) from error


def _warn_of_code(directory: Path) -> None:
    """Warn of a tokenizer whose code is in the checkpoint (Kimi's), and not run: its rules are not in its files."""
    settings = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").is_file() or not settings.is_file():
        return
    if "AutoTokenizer" in (read_json(settings).get("auto_map") or ()):
        logger.warning(
            "%s brings code for its tokenizer, which is not run: texts may be split into other tokens than the model "
            "was trained with; --tokenizer names a folder with a tokenizer.json",
            directory,
        )


def _is_plain(directory: Path) -> bool:
    """True when tokenizer.json holds the whole tokenizer, for families known to keep it there."""
    files = [directory / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return False
    settings = read_json(files[2])
    plain = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    plain_types = {traits.plain_tokenizer_type for traits in FAMILIES.values()} - {None}
    return plain and "auto_map" not in settings and read_json(files[0]).get("model_type") in plain_types


def eos_token_ids(
    path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, more: Path | None = None
) -> frozenset[int]:
    """Ids of all tokens that generation_config.json, config.json, the tokenizer or the file `more` call the end of a
    sequence.

    Raises:
        InvalidRequestError: one of them is no token id.
    """
    found: set[int] = set()
    if is_gguf(path):
        found |= end_ids(read_model_config(path)["eos_token_id"], str(path))
    for file in (Path(path) / "generation_config.json", Path(path) / "config.json", more):
        if file is not None and file.is_file():
            found |= end_ids(language_config(read_json(file)).get("eos_token_id"), file.name)
    return frozenset(found | end_ids(getattr(tokenizer, "eos_token_id", None), "the tokenizer"))


def end_ids(value: Any, source: str) -> frozenset[int]:
    """Ids in a field `eos_token_id`: one, a list of them, or none.

    Raises:
        InvalidRequestError: it is something else; the message names the `source`.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int or not 0 <= item < MAX_TOKEN_IDS:
            raise InvalidRequestError(
                f"{source}: eos_token_id must be a token id, 0 to {MAX_TOKEN_IDS - 1}, or a list of them, got "
                f"{quote_for_error(item)}",
                param="eos_token_id",
            )
    return frozenset(values)
