"""JSON files of a model directory. The module imports no torch, because the API process reads them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...platform.core.errors import InvalidRequestError, NotFoundError
from ..families.multimodal import language_config
from .gguf_file import is_gguf, read_gguf_config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model directory.

    Raises:
        NotFoundError: there is no such file.
        InvalidRequestError: it is no JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path.parent} has no readable {path.name}", param="model") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidRequestError: it is none; the message calls it `name`.
    """
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not valid JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is not a JSON object", param="model")
    return value


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Content of config.json in a model directory: of a multimodal one, that of its language model. Of a GGUF file,
    which has none, what it says in other words.

    Raises:
        NotFoundError: there is no such file.
        InvalidRequestError: the file is damaged, or is a GGUF file whose package is not installed.
        UnsupportedModelError: a GGUF file, or a multimodal checkpoint, of a model that is not served.
    """
    if is_gguf(path):
        return read_gguf_config(Path(path))
    file = Path(path) / "config.json"
    if not file.is_file() and file.with_name("adapter_config.json").is_file():
        raise NotFoundError(
            f"{path} is an adapter and no model: name its base model, and it in --lora-modules or a LoRARequest",
            param="model",
        )
    return language_config(read_json(file))
