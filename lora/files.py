"""The files of one engine's adapters: where a request's are, whether they changed, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ..platform.core.lora_request import LoRARequest
from .adapter import Adapter, AdapterSource, DraftTarget, Fingerprint, check_folders, fingerprint, parse
from .layout import ModelLayout
from .plans import ReadPlans
from .weights import ModuleShape


class AdapterFiles:
    """Knows what the engine's models take. Any thread may read."""

    def __init__(
        self,
        modules: Mapping[str, ModuleShape],
        draft_method: str,
        draft_modules: Mapping[str, ModuleShape],
        *,
        max_rank: int,
        dtype: torch.dtype,
        layout: ModelLayout | None = None,
    ) -> None:
        """`modules` are the target's, by the checkpoint's names; without `draft_modules` draft weights are not read.
        `layout`: of the target's rows, in which adapters like those before (`plans`) come packed."""
        self.modules = modules
        self.draft = DraftTarget(draft_method, draft_modules) if draft_modules else None
        self.max_rank = max_rank
        self.dtype = dtype
        self._plans = ReadPlans(layout) if layout is not None else None

    def source(self, request: LoRARequest) -> AdapterSource:
        """Where the files are that a request means here."""
        draft_path = request.draft_path if self.draft is not None else None
        return AdapterSource(os.path.abspath(request.path), draft_path and os.path.abspath(draft_path))

    def check(self, source: AdapterSource) -> None:
        """AdapterError unless its folders exist: what can be said without reading a file."""
        check_folders(source)

    def changed(self, source: AdapterSource, before: Fingerprint) -> bool:
        """Whether the files are others than when their fingerprint was `before`."""
        return fingerprint(source, self.draft.method if self.draft is not None else None) != before

    def read(self, source: AdapterSource) -> Adapter:
        """See `parse`; AdapterError."""
        return parse(
            source.path,
            self.modules,
            max_rank=self.max_rank,
            dtype=self.dtype,
            draft=self.draft,
            draft_path=source.draft_path,
            plans=self._plans,
        )
