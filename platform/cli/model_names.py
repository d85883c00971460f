"""Names of the base model in the API: the one that is shown, and the others that requests may use for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_HUB_FOLDER = "models--"
"""Prefix of a repository's folder in the hub's cache: `models--OWNER--NAME/snapshots/COMMIT`."""


class ModelNames(NamedTuple):
    """All names of the base model."""

    shown: tuple[str, ...]
    """Those of `/v1/models`; the first is the one in answers to requests that name none."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""


def names_of_model(model: str) -> ModelNames:
    """The names of a folder or hub id that the server was started with.

    Shown is the last part of the path as it was written, so the name of a link and not that of its target; for a
    snapshot in the hub's cache it is the hub id. Aliases are the model as it was given, with and without a slash at its
    end, its absolute and its resolved path, the hub id and the short name.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return _distinct(model.rstrip("/").rpartition("/")[2], [model])
    absolute, resolved = os.path.abspath(path), os.path.realpath(path)
    hub_id = _hub_id(absolute) or _hub_id(resolved)
    short = _hub_id(absolute) or os.path.basename(absolute) or absolute
    paths = [model, os.path.normpath(model), str(path), absolute, resolved]
    aliases = [spelling for path in paths for spelling in (path.rstrip("/"), path.rstrip("/") + "/")]
    if hub_id is not None:
        aliases += [hub_id, hub_id.rpartition("/")[2]]
    return _distinct(short, aliases)


def _hub_id(path: str) -> str | None:
    repository = Path(path).parent.parent.name
    if Path(path).parent.name != "snapshots" or not repository.startswith(_HUB_FOLDER):
        return None
    return repository.removeprefix(_HUB_FOLDER).replace("--", "/")


def _distinct(shown: str, aliases: list[str]) -> ModelNames:
    return ModelNames((shown,), tuple(name for name in dict.fromkeys(aliases) if name and name != shown))
