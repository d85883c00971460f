"""generation_config.json of a model or an adapter: sampling parameters for requests that leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...platform.core.adapter_files import GENERATION_CONFIG, AdapterFolder
from ...platform.core.errors import AdapterError, InvalidRequestError
from ...platform.core.sampling_params import SamplingParams
from .json_files import parse_json, read_json

AUTOMATIC = "auto"
"""Option value for the model's own file."""
NOTHING = ("none", "vllm")
"""Option values for no file; the second one is vLLM's."""
PARAM = "generation_config"

_MAX_BYTES = 1 << 20
_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Sampling parameters by their names in the file. `do_sample` is not read, as in vLLM: temperature 0 is greedy."""


def chosen_file(choice: str) -> Path | None:
    """Path of the file that an option's value names, itself or by its folder; None for `AUTOMATIC` and `NOTHING`.

    Raises:
        InvalidRequestError: there is no such file.
    """
    if choice == AUTOMATIC or choice in NOTHING:
        return None
    path = Path(choice).expanduser()
    file = path / GENERATION_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequestError(f"there is no file {file}; it is auto, none or a path", param=PARAM)
    return file


def sampling_defaults(file: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` that the file sets; empty when there is no file.

    Raises:
        InvalidRequestError: it is no JSON object of a bounded size, or one of these fields has a wrong value.
    """
    if not file.is_file():  # a pipe or a device would be read forever
        return {}
    if file.stat().st_size > _MAX_BYTES:
        raise InvalidRequestError(f"{file} is larger than {_MAX_BYTES} bytes", param=PARAM)
    return _checked(read_json(file), str(file), PARAM)


def adapter_defaults(folder: AdapterFolder) -> dict[str, Any]:
    """Fields of `SamplingParams` that an adapter's file sets; empty when there is no file.

    Raises:
        AdapterError: it is no JSON object of a bounded size, or one of these fields has a wrong value.
    """
    content = folder.read(GENERATION_CONFIG, _MAX_BYTES)
    try:
        return {} if content is None else _checked(parse_json(content, GENERATION_CONFIG), GENERATION_CONFIG, PARAM)
    except InvalidRequestError as error:
        raise AdapterError(error.message, param="lora_path") from error


def overriding_defaults(given: Any) -> dict[str, Any]:
    """Fields of `SamplingParams` that the option `override_generation_config` sets.

    Raises:
        InvalidRequestError: it is no object, or a name or a value in it is wrong.
    """
    name = "override_generation_config"
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{name} must be an object, got {given!r:.100}", param=name)
    for key in given:
        if key not in _FIELDS:
            raise InvalidRequestError(f"{name}: unknown {key!r:.100}; known are {', '.join(_FIELDS)}", param=name)
    return _checked(given, name, name)


def _checked(raw: Mapping[str, Any], source: str, param: str) -> dict[str, Any]:
    found = {ours: _plain(raw[theirs]) for theirs, ours in _FIELDS.items() if raw.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{source}: {error.message}", param=param) from error
    return found


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
