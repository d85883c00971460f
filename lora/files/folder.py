"""Folders of one engine's adapters: found, checked and read.

    <adapter>/                    adapter_config.json, adapter_model.safetensors: for the target
    <adapter>/draft/<method>/     the same for the drafter of that method of speculation ...
    <adapter>/draft/              ... or for the only drafter that the adapter knows

Both parts are one adapter: read, digested, placed and dropped together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ...platform.core.adapter_files import CONFIG_FILE, WEIGHT_FILES, files_digest
from ...platform.core.errors import AdapterError
from ...platform.core.lora_request import LoRARequest
from ...platform.core.speculative_config import MODEL_METHODS
from ..adapter import DRAFT_LOADED, Adapter, AdapterSource, changed_error
from ..device.layout import PackedModules
from ..step_yield import yield_to_steps
from .peft_config import adapter_error, shown
from .peft_weights import WeightsReader
from .tensor_keys import BASE, DRAFTER, ModelModules

_DRAFT_FOLDER = "draft"


class AdapterFiles:
    """Reads adapters for the engine's models. Thread-safe."""

    def __init__(self, target: ModelModules, drafter: ModelModules, *, draft_method: str, max_rank: int) -> None:
        """Read up to `max_rank`. Draft weights are for the method of speculation `draft_method`, and not read when the
        drafter has no modules."""
        self.target, self.drafter = target, drafter
        self.draft_method = draft_method
        self.max_rank = max_rank
        self._target = WeightsReader(target, max_rank, BASE)
        self._draft = WeightsReader(drafter, max_rank, DRAFTER) if drafter.shapes else None

    def source(self, request: LoRARequest) -> AdapterSource:
        """Return the folders that a request means here."""
        draft_path = request.draft_path if self._draft is not None else None
        return AdapterSource(os.path.abspath(request.path), draft_path and os.path.abspath(draft_path), request.digest)

    def check(self, source: AdapterSource) -> None:
        """Refuse (AdapterError) folders that do not exist, without reading a file."""
        if not os.path.isdir(source.path):  # False, too, for a path that no file system takes
            raise adapter_error(f"the adapter's folder {shown(source.path)} does not exist")
        if source.draft_path is not None and not os.path.isdir(source.draft_path):
            raise AdapterError(f"draft_path: the folder {shown(source.draft_path)} does not exist", param="draft_path")

    def num_bytes(self, source: AdapterSource) -> int:
        """Return the size of the files that `read` may read."""
        size = 0
        for folder in (source.path, *(self._draft_folders(source) if self._draft is not None else ())):
            for name in (CONFIG_FILE, *WEIGHT_FILES):
                with contextlib.suppress(OSError, ValueError):  # it is missing; ValueError: a NUL in the path
                    size += os.stat(os.path.join(folder, name)).st_size
        return size

    def read(self, source: AdapterSource) -> Adapter:
        """Read an adapter, and its draft weights.

        Raises:
            AdapterError: as in `WeightsReader.read`; the files are not those that were registered on another server.
                The same for draft weights whose folder was named; other draft weights that do not fit are left out.
        """
        if source.digest is not None and files_digest(source.path, yield_to_steps) != source.digest:
            raise changed_error(source.path)
        self.check(source)
        target, digest = self._target.read(Path(source.path))
        found = self._read_draft(source)
        if target.invocation and not isinstance(found, str):
            found = "draft weights are not used with alora_invocation_tokens"
        if isinstance(found, str):
            return Adapter(digest, target, self.drafter.layout.pack({}), found)
        drafter, draft_digest = found
        digest = hashlib.sha256(b"with draft weights" + digest + draft_digest).digest()
        return Adapter(digest, target, drafter, DRAFT_LOADED)

    def _read_draft(self, source: AdapterSource) -> tuple[PackedModules, bytes] | str:
        """Read the draft weights; "" when there are none, or the reason why they cannot be used."""
        if self._draft is None:
            return ""
        try:
            folder = self._find_draft(source)
            return self._draft.read(Path(folder)) if folder is not None else ""
        except AdapterError as error:
            if source.draft_path is None:
                return error.message
            raise AdapterError(f"draft_path: {error.message}", param="draft_path") from error

    def _draft_folders(self, source: AdapterSource) -> tuple[str, str]:
        """Return the folders where draft weights may lie; the first that exists is meant."""
        root = os.path.join(source.path, _DRAFT_FOLDER) if source.draft_path is None else source.draft_path
        return os.path.join(root, self.draft_method), root

    def _find_draft(self, source: AdapterSource) -> str | None:
        """Find the folder with the draft weights; None when there are none, or only some for other methods.

        Raises:
            AdapterError: something has the name of draft weights and is none.
        """
        nested, root = self._draft_folders(source)
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
    """Return whether a folder has this path; AdapterError when something else has it, or a link to no folder."""
    if os.path.isdir(path):
        return True
    try:
        os.lstat(path)
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the path
        return False
    except OSError as error:
        raise adapter_error(f"cannot read {shown(path)}: {error.strerror}") from error
    raise adapter_error(f"{shown(path)} is not a folder, or a link that leads to none")
