"""An adapter as served: parsed from a PEFT folder, checked against the base model, told apart by its content.

    <adapter>/                    adapter_config.json, adapter_model.safetensors: for the target
    <adapter>/draft/<method>/     the same for the drafter of that method of speculation ...
    <adapter>/draft/              ... or for the only drafter that the adapter knows

Both parts are one object: read, digested, placed and dropped together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ..platform.core.adapter_files import CONFIG_FILE, WEIGHT_FILES
from ..platform.core.errors import AdapterError
from ..platform.core.speculative_config import MODEL_METHODS
from .files.peft_config import adapter_error, shown
from .files.read_plan import ReadPlans
from .files.weights import DRAFTER, FolderWeights, LoraWeights, ModuleShape, read_weights

__all__ = ["Adapter", "AdapterSource", "DraftTarget", "LoraWeights", "ModuleShape", "parse"]

DRAFT_FOLDER = "draft"
LOADED = "loaded"
"""`Adapter.draft` when there are draft weights."""


class AdapterSource(NamedTuple):
    """Where an adapter's files are."""

    path: str
    draft_path: str | None = None
    """The draft weights' folder, when it was named; None: `DRAFT_FOLDER` of `path`, where it exists and fits."""
    digest: str | None = None
    """Digest of the files as another server registered them (`files_digest`); None: no server did."""

    def matches(self, asked: AdapterSource) -> bool:
        """Return whether a request that asks for `asked` means this; without a draft path it means the one
        registered."""
        return self.path == asked.path and asked.draft_path in (None, self.draft_path)


class DraftTarget(NamedTuple):
    """Purpose of draft weights: the engine's drafter."""

    method: str
    """Method of `speculative_config`."""
    modules: Mapping[str, ModuleShape]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A parsed adapter in host memory. Never changed."""

    digest: bytes
    """SHA-256 of what it computes: every adapted module's name and tensors as served, the drafter's too. Keys every
    cache."""
    rows: int
    """Rank rows that it takes on the device: the largest rank of its modules, the drafter's too."""
    modules: Mapping[str, LoraWeights]
    """By module name of the base model, e.g. "model.layers.3.self_attn.q_proj"."""
    draft_modules: Mapping[str, LoraWeights] = field(default_factory=dict)
    """By module name of the drafter."""
    draft: str = ""
    """`LOADED`; "" when it brings no draft weights, or nothing here would use them; else why they are not used."""

    @property
    def rank(self) -> int:
        """The largest of the base model's modules."""
        return max((len(part.a) for part in self.modules.values()), default=0)


def _draft_folders(source: AdapterSource, method: str) -> tuple[str, str]:
    """Where draft weights may lie, the first of them that exists is meant."""
    root = os.path.join(source.path, DRAFT_FOLDER) if source.draft_path is None else source.draft_path
    return os.path.join(root, method), root


def num_bytes(source: AdapterSource, method: str | None = None) -> int:
    """The size of the files that `parse` may read. `method`: the drafter's, whose files count too."""
    size = 0
    for folder in (source.path, *(_draft_folders(source, method) if method is not None else ())):
        for name in (CONFIG_FILE, *WEIGHT_FILES):
            with contextlib.suppress(OSError, ValueError):  # it is missing; ValueError: a NUL in the path
                size += os.stat(os.path.join(folder, name)).st_size
    return size


def changed_error(name: str, reason: str = "") -> AdapterError:
    """The error for an adapter whose files are not those that were registered."""
    why = f" ({reason})" if reason else ""
    return adapter_error(
        f"the files of adapter {shown(name)} have changed since it was loaded{why}; load it again with load_inplace"
    )


def check_folders(source: AdapterSource) -> None:
    """AdapterError, for the part concerned, unless the folders that were named exist and can be looked into."""
    if not os.path.isdir(source.path):  # False, too, for a path that no file system takes
        raise adapter_error(f"the adapter's folder {shown(source.path)} does not exist")
    if source.draft_path is not None and not os.path.isdir(source.draft_path):
        raise AdapterError(f"draft_path: the folder {shown(source.draft_path)} does not exist", param="draft_path")


def parse(
    path: str,
    known: Mapping[str, ModuleShape],
    *,
    max_rank: int,
    dtype: torch.dtype,
    draft: DraftTarget | None = None,
    draft_path: str | None = None,
    plans: ReadPlans | None = None,
) -> Adapter:
    """Read a PEFT folder, and its draft weights.

    Args:
        path: The folder with adapter_config.json and adapter_model.safetensors (or .bin).
        known: The modules of the base model that adapters may target, by their Hugging Face names.
        max_rank: The largest rank served.
        dtype: The dtype in which the adapter will be used.
        draft: The engine's drafter; None: draft weights are not looked at.
        draft_path: See `AdapterSource`.
        plans: Of other adapters with the same `known`, `max_rank` and `dtype`; see `plans`.

    Raises:
        AdapterError: files missing or broken, something that is not served, a rank above `max_rank`, a module that the
            base does not have or that has another shape there, weights that are not finite. The same for draft weights
            whose folder was named; other draft weights that do not fit are left out.
    """
    source = AdapterSource(path, draft_path if draft is not None else None)
    check_folders(source)
    weights = read_weights(Path(source.path), known, max_rank, dtype, plans=plans)
    found: FolderWeights | str = _read_draft(source, draft, max_rank, dtype) if draft is not None else ""
    if isinstance(found, str):
        return Adapter(weights.digest, weights.rank, weights.modules, draft=found)
    digest = hashlib.sha256(b"with draft weights" + weights.digest + found.digest).digest()
    return Adapter(digest, max(weights.rank, found.rank), weights.modules, found.modules, LOADED)


def _read_draft(source: AdapterSource, target: DraftTarget, max_rank: int, dtype: torch.dtype) -> FolderWeights | str:
    """The draft weights, "" when there are none, or why they cannot be used."""
    try:
        folder = _find_draft(source, target.method)
        return read_weights(Path(folder), target.modules, max_rank, dtype, DRAFTER) if folder is not None else ""
    except AdapterError as error:
        if source.draft_path is None:
            return error.message
        raise AdapterError(f"draft_path: {error.message}", param="draft_path") from error


def _find_draft(source: AdapterSource, method: str) -> str | None:
    """The folder with the draft weights for a method; None when there are none, or only some for other methods.

    Raises:
        AdapterError: something has the name of draft weights and is none.
    """
    nested, root = _draft_folders(source, method)
    if not _is_folder(root):
        return None
    if _is_folder(nested):
        return nested
    try:
        entries = set(os.listdir(root))
    except OSError as error:
        raise adapter_error(f"cannot read the folder {shown(root)}: {error.strerror}") from error
    if source.draft_path is not None or entries & {CONFIG_FILE, *WEIGHT_FILES}:
        return root
    if entries & set(MODEL_METHODS):
        return None
    raise adapter_error(f"the folder {shown(root)} holds no draft weights")


def _is_folder(path: str) -> bool:
    """Return whether it is one; AdapterError when something else has its name, or a link that leads to no folder."""
    if os.path.isdir(path):
        return True
    try:
        os.lstat(path)
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the path
        return False
    except OSError as error:
        raise adapter_error(f"cannot read {shown(path)}: {error.strerror}") from error
    raise adapter_error(f"{shown(path)} is not a folder, or a link that leads to none")
