"""Names of the base model in the API: the shown name, and its aliases in requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_HUB_FOLDER = "models--"
"""Prefix of a repository's folder in the hub's cache: `models--OWNER--NAME/snapshots/COMMIT`."""


class ModelNames(NamedTuple):
    """All names of the base model."""

    shown: tuple[str, ...]
    """Names in `/v1/models`. Answers to requests without a name have the first."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""


def names_of_model(model: str) -> ModelNames:
    """Names of a model, from the folder or hub id that the server was started with.

    The shown name is the last part of the hub id or of the given path; for a link it is the link's name, for a file it
    has no suffix. Aliases are the given model with and without a slash at its end, its absolute and its resolved path,
    and the hub id of a snapshot in the hub's cache.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return _distinct(path.stem, [model, path.name, os.path.abspath(path), os.path.realpath(path)])
    if not path.is_dir():
        return _distinct(_last_part(model), [model])
    absolute, resolved = os.path.abspath(path), os.path.realpath(path)
    hub_id = _hub_id(resolved)
    spellings = [model, os.path.normpath(model), str(path), absolute, resolved]
    aliases = [name for spelling in spellings for name in (spelling.rstrip("/"), spelling.rstrip("/") + "/")]
    if hub_id is not None:
        aliases += [hub_id, _last_part(hub_id)]
    return _distinct(_last_part(_hub_id(absolute) or absolute), aliases)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name


def _hub_id(path: str) -> str | None:
    repository = Path(path).parent.parent.name
    if Path(path).parent.name != "snapshots" or not repository.startswith(_HUB_FOLDER):
        return None
    return repository.removeprefix(_HUB_FOLDER).replace("--", "/")


def _distinct(shown: str, aliases: list[str]) -> ModelNames:
    return ModelNames((shown,), tuple(name for name in dict.fromkeys(aliases) if name and name != shown))
