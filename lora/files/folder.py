"""The files of one engine's adapters: where a request's are, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ...platform.core.adapter_files import files_digest
from ...platform.core.lora_request import LoRARequest
from ..adapter import Adapter, AdapterSource, DraftTarget, changed_error, check_folders, parse
from ..device.layout import ModelLayout
from ..tiers.step_signal import give_way
from .read_plan import ReadPlans
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
        return AdapterSource(os.path.abspath(request.path), draft_path and os.path.abspath(draft_path), request.digest)

    def check(self, source: AdapterSource) -> None:
        """AdapterError unless its folders exist: what can be said without reading a file."""
        check_folders(source)

    def read(self, source: AdapterSource) -> Adapter:
        """See `parse`; AdapterError, also where the files are not those that were registered elsewhere."""
        if source.digest is not None and files_digest(source.path, give_way) != source.digest:
            raise changed_error(source.path)
        return parse(
            source.path,
            self.modules,
            max_rank=self.max_rank,
            dtype=self.dtype,
            draft=self.draft,
            draft_path=source.draft_path,
            plans=self._plans,
        )
