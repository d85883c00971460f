"""Folders of one engine's adapters: found, checked and read.

    <adapter>/                    adapter_config.json, adapter_model.safetensors: for the target
    <adapter>/draft/<method>/     the same for the drafter of that method of speculation ...
    <adapter>/draft/              ... or for the only drafter that the adapter knows

Both parts are one adapter: read, digested, loaded and evicted together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from ...platform.core.adapter_files import ADAPTER_FILES, DRAFT_FOLDER, AdapterFolder, copied
from ...platform.core.errors import AdapterError
from ...platform.core.lora_request import LoRARequest
from ...platform.core.speculative_config import MODEL_METHODS
from ..adapter import DRAFT_LOADED, Adapter, AdapterSource, changed_error
from ..device.layout import PackedModules
from ..step_yield import yield_to_steps
from .errors import adapter_error, quote_path
from .peft_weights import WeightsReader
from .tensor_keys import BASE, DRAFTER, ModelModules


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
        path = request.path if request.files else os.path.abspath(request.path)
        draft_path = draft_path and os.path.abspath(draft_path)
        return AdapterSource(path, draft_path, request.digest, request.roots, request.files)

    def check(self, source: AdapterSource) -> None:
        """Refuse (AdapterError) folders that do not exist, without reading a file."""
        if not source.files and not os.path.isdir(source.path):  # False, too, for a path that no file system takes
            raise adapter_error(f"the adapter's folder {quote_path(source.folder.label)} does not exist")
        if source.draft_path is not None and not os.path.isdir(source.draft_path):
            label = AdapterFolder(source.draft_path, source.roots).label
            raise AdapterError(f"draft_path: the folder {quote_path(label)} does not exist", param="draft_path")

    def num_bytes(self, source: AdapterSource) -> int:
        """Return the memory that `read` may take: the size of the files, and of copies of them."""
        folders = [source.folder]
        with contextlib.suppress(AdapterError, OSError):  # `read` raises the error
            folders += filter(None, self._draft_folders(source) if self._draft is not None else ())
        size = 0
        for folder in folders:
            for name in ADAPTER_FILES:
                with contextlib.suppress(AdapterError, OSError):
                    found = folder.inspect(name)
                    size += 0 if found is None else found[1].st_size
        return size if source.digest is None else 2 * size  # its copies

    def read(self, source: AdapterSource) -> Adapter:
        """Read an adapter, and its draft weights.

        Raises:
            AdapterError: as in `WeightsReader.read`; the files are not those that were registered on another server.
                The same for draft weights whose folder was named; other draft weights that do not fit are left out.
        """
        if source.digest is None:
            return self._read(source, source.folder)
        with copied(source.folder, source.digest, yield_to_steps, self._target.limits.num_bytes) as folder:
            if folder is None:
                raise changed_error(source.folder.label)
            return self._read(source, folder)

    def _read(self, source: AdapterSource, folder: AdapterFolder) -> Adapter:
        self.check(source)
        target, digest = self._target.read(folder)
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
            return self._draft.read(folder) if folder is not None else ""
        except AdapterError as error:
            if source.draft_path is None:
                return error.message
            raise AdapterError(f"draft_path: {error.message}", param="draft_path") from error

    def _draft_folders(self, source: AdapterSource) -> tuple[AdapterFolder | None, AdapterFolder | None]:
        """Return the existing folders for draft weights; the first is used.

        Raises:
            AdapterError: one of the names is no folder, or a link leads out of the roots.
        """
        if source.draft_path is None:
            root = source.folder.below(DRAFT_FOLDER)
        else:
            root = AdapterFolder(source.draft_path, tuple(source.roots))
        return None if root is None else root.below(self.draft_method), root

    def _find_draft(self, source: AdapterSource) -> AdapterFolder | None:
        """Find the folder with the draft weights; None if there are none, or only for other methods.

        Raises:
            AdapterError: a folder with the name of draft weights has none.
        """
        nested, root = self._draft_folders(source)
        if nested is not None or root is None:
            return nested
        if source.draft_path is not None or any(map(root.has, ADAPTER_FILES)):
            return root
        if any(root.below(method) is not None for method in MODEL_METHODS):
            return None
        raise adapter_error(f"the folder {root.prefix.rstrip('/')} of the adapter holds no draft weights")
